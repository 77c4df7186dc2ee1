"""A process that is `bigmodel serve`; it can be told to break.

python -m tests.cli.serve_command sound|breaks ARGUMENTS OF bigmodel
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

import bigmodel.server.http.run
from bigmodel.cli.main import main
from bigmodel.server.engine.compute.runner import PackedRunner

BREAKS = [7, 7, 7]
"""A prompt at which the device fails, where the process was told to break."""


def _break_at(tokens: list[int]) -> None:
    """Let every forward fail from the step on that computes ``tokens``."""
    compute, forward = PackedRunner.compute, PackedRunner._forward
    broken = False

    def noticing(self: PackedRunner, batch: Any) -> Any:
        nonlocal broken
        broken = broken or any(packed.tokens == tokens for packed in batch)
        return compute(self, batch)

    def failing(self: PackedRunner, *arguments: Any) -> Any:
        if broken:
            raise RuntimeError("secret detail of the failure")
        return forward(self, *arguments)

    PackedRunner.compute = noticing  # type: ignore[method-assign]
    PackedRunner._forward = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    if sys.argv[1] == "breaks":
        _break_at(BREAKS)
        bigmodel.server.http.run.LINGER_SECONDS = 100.0  # the process is asked for its health, and ended by a signal
    main(sys.argv[2:])
