"""Errors of operations that autograd's own C++ code asks for, postponed to the end of the backward pass.

A Python error that is raised into this code is still pending while its stack is unwound. On the way PyTorch's guard of
the device's stream calls Python, which refuses to run with an error pending, and the process ends by `std::terminate`.
So the operation is done all the same, and the backward pass raises the error when its last node has run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import torch
from torch.autograd.graph import _engine_run_backward

_HERE = str(Path(__file__).parent)


def postponed(error: Exception) -> bool:
    """Whether the running operation must not raise `error`, because the backward pass it belongs to is going to."""
    if torch._C._current_graph_task_id() == -1 or not _asked_for_by_the_engine():
        return False

    pending = [error]

    def raise_error() -> NoReturn:
        # Nothing here may refer to the error when it has been raised: its traceback refers to this frame, and all that
        # the frames around it hold, above all what lies on the device, would stay until the garbage collector comes.
        raise pending.pop()

    torch.autograd.Variable._execution_engine.queue_callback(raise_error)
    return True


def _asked_for_by_the_engine() -> bool:
    """Whether no Python code lies between autograd's engine and the operation of this package that is running."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code is _engine_run_backward.__code__
