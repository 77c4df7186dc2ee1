"""Errors of operations called by autograd's C++ code, postponed to the end of the backward pass.

A Python error raised into that code is still pending while its stack is unwound. During unwinding PyTorch's stream
guard calls Python, which does not run with a pending error, and the process ends by `std::terminate`. Such an operation
is therefore executed nevertheless, and the backward pass raises the error after its last node.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import torch
from torch.autograd.graph import _engine_run_backward

_HERE = str(Path(__file__).parent)


def postponed(error: Exception) -> bool:
    """Return whether `error` was postponed: the caller must not raise it, since the backward pass will."""
    if torch._C._current_graph_task_id() == -1 or not _called_by_engine():
        return False

    pending = [error]

    def raise_error() -> NoReturn:
        # No variable here may refer to the error once it is raised: its traceback refers to this frame, and the
        # reference cycle would keep device memory alive until the next garbage collection.
        raise pending.pop()

    torch.autograd.Variable._execution_engine.queue_callback(raise_error)
    return True


def _called_by_engine() -> bool:
    """Whether autograd's engine called the running operation of this package with no other Python code in between."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code is _engine_run_backward.__code__
