"""A process that is `bigmodel serve`, forked from one that has imported everything; it can be told to break."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any

import torch

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


def command(arguments: Seq[str], log: str, breaks: bool) -> None:
    """Run `bigmodel` with ``arguments`` and exit with its code; what it says goes to the file ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    if breaks:
        _break_at(BREAKS)
    main(arguments)
