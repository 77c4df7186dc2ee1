"""Running the processes of a launch through torch.distributed.run, and reporting how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ..errors import LaunchError
from ..train.environment import STANDS_IN, changed_environment
from .environment import launch_environment
from .flags import Launch
from .processes import Processes, plan_processes
from .settings import LaunchConfig

# DeepSpeed and FSDP need a process group even for a single process.
_NEEDS_GROUP = ("DEEPSPEED", "FSDP")


def run(launch: Launch) -> int:
    """Run the script of `launch` to its end and return the exit code of the job: 0, or that of the first failure.

    A single process without a process group replaces the current one (POSIX), so it does not return then.

    Raises:
        LaunchError: the configuration cannot be run here; nothing was started.
    """
    _check_script(launch)
    processes = plan_processes(launch.config)
    environment = launch_environment(launch.config, processes.here, processes.cpu)
    if processes.distributed or launch.config.max_restarts or launch.config.distributed_type in _NEEDS_GROUP:
        return _run_elastic(launch, processes, environment)
    return _run_alone(launch, environment)


def elastic_arguments(config: LaunchConfig, processes: Processes) -> list[str]:
    """The arguments of torch.distributed.run that start `processes`."""
    arguments = [f"--nproc_per_node={processes.here}", f"--nnodes={processes.machines}"]
    arguments += [f"--rdzv_backend={processes.backend}", f"--node_rank={processes.machine_rank}"]
    if processes.backend == "static":
        arguments += [f"--master_addr={processes.address}", f"--master_port={processes.port}"]
    else:
        identity = f"{processes.address}-{processes.port}" if processes.port else uuid.uuid4().hex
        arguments += [f"--rdzv_endpoint={processes.address}:{processes.port or 0}", f"--rdzv_id={identity}"]
        arguments += ["--local_addr=localhost"] if processes.port is None else []
    for name in ("rdzv_conf", "max_restarts", "monitor_interval", "role", "tee"):
        value = getattr(config, name)
        if value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def _check_script(launch: Launch) -> None:
    if not launch.module and not launch.no_python and not Path(launch.script).is_file():
        raise LaunchError(f"The training script {launch.script} does not exist.")


def inheriting(launch: Launch) -> Launch:
    """Return the launch that runs the same script through `bigmodel run`, if this process stands in for accelerate."""
    if launch.no_python or os.environ.get(STANDS_IN) != "1":
        return launch
    given = (*(["-m"] if launch.module else []), launch.script, *launch.script_arguments)
    return replace(launch, module=True, script="bigmodel", script_arguments=("run", *given))


def _run_alone(launch: Launch, environment: dict[str, str]) -> int:
    launch = inheriting(launch)
    command = [] if launch.no_python else [sys.executable]
    command += ["-m", launch.script] if launch.module else [launch.script]
    command += launch.script_arguments
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, {**os.environ, **environment})
    except OSError as error:
        raise LaunchError(f"Cannot start {command[0]}: {error.strerror}.") from error


def _run_elastic(launch: Launch, processes: Processes, environment: dict[str, str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    from .rendezvous import stores_anew

    launch = inheriting(launch)
    arguments = elastic_arguments(launch.config, processes)
    arguments += ["--module"] if launch.module else []
    arguments += ["--no_python"] if launch.no_python else []
    with (
        changed_environment(environment),
        launcher_log(bool(launch.config.debug)),
        log_folder(launch.config.log_dir) as logs,
    ):
        arguments.append(f"--log_dir={logs}")
        parsed = get_args_parser().parse_args([*arguments, launch.script, *launch.script_arguments])
        config, command, command_arguments = config_from_args(parsed)
        try:
            with changed_environment(stores_anew(config)):
                elastic_launch(config, command)(*command_arguments)
        except ChildFailedError as failed:
            return _report(failed, launch.quiet)
        except SignalException as stopped:
            _end_children()
            return 128 + int(stopped.sigval)
        except KeyboardInterrupt:
            _end_children()
            return 128 + signal.SIGINT
        except (DistError, RendezvousError) as error:
            raise LaunchError(
                f"The processes could not meet at {processes.address}:{processes.port} "
                f"(machine_rank {processes.machine_rank} of {processes.machines}): {_first_line(error)}. "
                "Check main_process_ip, main_process_port and that machine 0 has been started."
            ) from error
    return 0


def _end_children() -> None:
    """End the children that torch's agent left running: it does not track a process that it was just starting."""
    left = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        _, left = psutil.wait_procs(left, timeout=5)


def _report(failed: Any, quiet: bool) -> int:
    """Name the process that failed first; its own traceback is already on the terminal. Returns its exit code."""
    rank, failure = failed.get_first_failure()
    code = failure.exitcode
    if not quiet:
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        others = len(failed.failures) - 1
        also = f" {others} more failed after it." if others else ""
        print(f"bigmodel launch: process {rank} (pid {failure.pid}) {how}.{also}", file=sys.stderr)
    return 128 - code if code < 0 else code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def log_folder(given: str | None) -> Iterator[str]:
    """Yield the folder that torch's agent logs to: the one given, or a temporary one (the agent leaves its own)."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="bigmodel-launch-", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def launcher_log(show: bool) -> Iterator[None]:
    """Without `show`, keep torch's agent from logging its own failure report below the traceback."""
    logger = logging.getLogger("torch.distributed.elastic")
    loggers = [
        logger,
        *(
            child
            for name, child in logging.Logger.manager.loggerDict.items()
            if name.startswith("torch.distributed.elastic") and isinstance(child, logging.Logger)
        ),
    ]
    before = [(item, item.level) for item in loggers]
    if not show:
        for item in loggers:
            item.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for item, level in before:
            item.setLevel(level)
