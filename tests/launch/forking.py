"""Calls of the notebook launchers in a fresh process, since the test process may have started autograd's threads.

Run as `python -m tests.launch.forking FOLDER`; writes the outcome of each call to FOLDER/outcomes.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigmodel.devices import virtual
from bigmodel.errors import LaunchError
from bigmodel.launch import debug_launcher, sanity
from bigmodel.launch.start_method import why_not_fork


def collect(folder: Path) -> None:
    """Write what this process adds up with the others, and who started it."""
    from bigmodel.train import Accelerator

    accelerator = Accelerator()
    method = "forked" if __name__ == "__main__" else "spawned"
    if method == "forked":  # a fresh interpreter would take seconds to import what training needs
        model, _ = accelerator.prepare(torch.nn.Linear(1, 1), None)
        accelerator.backward(model(torch.ones(1, 1)).sum())
    total = accelerator.reduce(torch.ones(1), "sum").item()
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps([total, str(accelerator.device), method]))
    accelerator.end_training()


def fail(rank: str) -> None:
    """Fail in one process."""
    if os.environ["RANK"] == rank:
        raise ValueError("not this one")


def outcome(call: Callable[[], Any]) -> str:
    """Return the LaunchError with its class, or "" when there was none."""
    try:
        call()
    except LaunchError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    """Fork while that is possible; then let autograd start its threads."""
    found: dict[str, Any] = {}
    found["sanity"] = outcome(lambda: debug_launcher(sanity.main, num_processes=3))
    found["failed"] = outcome(lambda: debug_launcher(fail, ("1",)))
    for name in ("forked", "spawned"):
        if name == "spawned":
            virtual.enable(count=1)
            torch.ones(1, requires_grad=True).sum().backward()
            found["why not"] = why_not_fork(cpu=True)
        own = folder / name
        own.mkdir()
        found[name] = outcome(lambda own=own: debug_launcher(collect, (own,)))
    found["lambda"] = outcome(lambda: debug_launcher(lambda: None))
    (folder / "outcomes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
