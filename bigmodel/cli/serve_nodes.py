"""`bigmodel serve --nodes`: starts the processes of all stages, or is one of them.

    python -m bigmodel.cli.serve_nodes FILE

is a process of a stage; FILE is what `start` has written for it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from bigmodel.plan import NodesPlan
    from bigmodel.server import Settings
    from bigmodel.server.loading import LoadOptions

MONITOR_SECONDS = 0.2
"""How often the launcher looks whether a process has ended."""

_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable of the seconds after which torch's agent kills processes that it has told to end."""
_SLACK = 10
"""Seconds that the processes have beyond those in which requests finish."""


@dataclass(frozen=True)
class ServedNodes:
    """What each process of a served model over nodes is started with.

    Attributes:
        model: a folder or a Hub id.
        plan: the plan for the nodes as JSON.
        options: how stages are loaded, beside what the plan says.
        settings: of the server.
        host: address that the first process listens on.
        port: its port.
        log_level: how much it logs.
        slow_links: messages take as long as the plan's links take.
    """

    model: str
    plan: str
    options: LoadOptions
    settings: Settings
    host: str
    port: int
    log_level: str
    slow_links: bool = False


def refuse_beside_nodes(given: Mapping[str, object]) -> None:
    """Refuse options of `bigmodel serve` that mean one process, or that the plan decides.

    Args:
        given: options by name; false ones are not given.

    Raises:
        typer.BadParameter: one is given.
    """
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)}: not with --nodes; remove one of them")


def plan_for(model: str, file: Path, options: LoadOptions) -> NodesPlan:
    """Return the plan in `file`, as `bigmodel plan --nodes --json` prints it, or the one for the nodes that it
    describes.

    Raises:
        PlanError: the file is neither, or there is no plan for these nodes.
        LaunchError: a launched process was given a description: each would make a plan of its own.
    """
    from bigmodel.errors import LaunchError, PlanError
    from bigmodel.plan import NodesPlan, plan_nodes, read_nodes

    try:
        text = file.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise PlanError(f"{file}: the nodes cannot be read ({error})") from error
    if isinstance(content, dict) and "stages" in content:
        return NodesPlan.from_json(text)
    if launched():
        raise LaunchError(
            f"{file} describes nodes: make one plan for all processes with `bigmodel plan {model} --nodes {file} "
            "--json`"
        )
    dtype = options.get("dtype", "auto")
    return plan_nodes(
        model,
        read_nodes(file),
        options.get("batch_size", 1),
        options.get("context_length"),
        None if dtype == "auto" else dtype,
        revision=options.get("revision"),
    )


def launched() -> bool:
    """Return whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def start(served: ServedNodes, stages: int, restarts: int) -> int:
    """Run the processes of all stages on this machine, again after one has failed; return the exit code.

    Args:
        served: what they are started with.
        stages: how many there are.
        restarts: times that all are started again.
    """
    from bigmodel.launch.flags import Launch
    from bigmodel.launch.job import run
    from bigmodel.launch.settings import LaunchConfig
    from bigmodel.train.environment import changed_environment

    # Accelerators are those that the plan names: the launcher is not to give each process one.
    config = LaunchConfig(use_cpu=True, num_processes=stages, max_restarts=restarts, monitor_interval=MONITOR_SECONDS)
    with tempfile.TemporaryDirectory(prefix="bigmodel-serve-") as folder:  # readable by this user alone: it holds keys
        file = Path(folder) / "served"
        file.write_bytes(pickle.dumps(served))
        waits = {_SHUTDOWN: str(ceil(served.settings.drain_timeout) + _SLACK)}
        with changed_environment(waits):
            code = run(Launch(config, "bigmodel.cli.serve_nodes", (str(file),), module=True))
    return 0 if code == 128 + signal.SIGTERM else code  # as the server's own


def serve_stage(served: ServedNodes) -> int:
    """Serve or follow, as the rank of this process says; return the exit code.

    Raises:
        NodeLostError: a process of another stage is gone.
    """
    from bigmodel.plan import NodesPlan
    from bigmodel.server import create_app
    from bigmodel.server.http.run import bind, run
    from bigmodel.server.nodes import FirstStage, follow

    plan = NodesPlan.from_json(served.plan)
    given = served.model, plan, served.options, served.settings.engine, served.slow_links
    if int(os.environ.get("RANK", "0")):
        follow(*given)
        return 0
    import logging

    logging.basicConfig(level=served.log_level.upper(), format="%(levelname)s: %(message)s")
    listener = bind(served.host, served.port)
    first = FirstStage(*given)
    app = create_app(loader=first.load, settings=served.settings)
    code = run(app, listener, log_level=served.log_level)
    if app.state.server.failure is None:
        first.close()
    else:
        typer.echo(f"error: {app.state.server.failure}", err=True)
    return code


def stage_of_file(file: str) -> int:
    """Serve or follow as the file of `start` says; return the exit code."""
    served = pickle.loads(Path(file).read_bytes())  # written by the process that started this one
    assert isinstance(served, ServedNodes)
    return serve_stage(served)


if __name__ == "__main__":
    from bigmodel.cli import serve_nodes  # not __main__: what was pickled is of that module
    from bigmodel.cli.log_filters import filter_library_logs
    from bigmodel.errors import BigModelError

    filter_library_logs()
    try:
        sys.exit(serve_nodes.stage_of_file(sys.argv[1]))
    except (BigModelError, OSError) as failed:
        print(f"bigmodel: {failed}", file=sys.stderr)
        sys.exit(1)
