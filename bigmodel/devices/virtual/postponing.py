"""Errors of operations and hooks called by autograd's C++ code, postponed to the end of the backward pass.

A Python error raised into that code is still pending while its stack is unwound. During unwinding PyTorch's stream
guard asks its device guard for the device's type, which for any device type that is registered from Python is a call of
Python (``PythonDeviceGuard`` in ``torch/csrc/acc``). That does not run with a pending error, and the process ends by
`std::terminate`. Such an operation is therefore executed nevertheless, a hook is taken to change nothing, and the
backward pass raises the error after its last node. Hooks of nodes that PyTorch implements in C++
(``y.grad_fn.register_hook``) cannot be guarded so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from .streams import TYPE

_HERE = str(Path(__file__).parent)

Hook = Callable[..., Any]


def postponed(error: BaseException) -> bool:
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


class GuardedHook:
    """A hook of autograd whose errors are postponed where it is called with virtual tensors.

    Args:
        hook: The user's hook.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: Any) -> Any:
        """Call the hook; where its error is postponed, return None: gradients stay as they are."""
        try:
            return self._hook(*args)
        except BaseException as error:
            if not any(map(_is_virtual, args)) or not postponed(error):
                raise
        return None


def _is_virtual(value: Any) -> bool:
    """Whether a gradient, or any of several, is a virtual tensor."""
    if isinstance(value, tuple):
        return any(map(_is_virtual, value))
    return isinstance(value, torch.Tensor) and value.device.type == TYPE


def guard_hooks(tensor: torch.Tensor) -> None:
    """Guard the hooks that a tensor has; the handles that remove them stay valid."""
    dicts: tuple[dict[Any, Any] | None, ...] = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    for hooks in filter(None, dicts):
        for key, hook in hooks.items():
            if not isinstance(hook, GuardedHook):
                hooks[key] = GuardedHook(hook)


def guard_hooks_of_functions() -> None:
    """Guard hooks of autograd functions written in Python from now on: those that modules' backward hooks are made of,
    and any other's."""
    for name in ("register_hook", "register_prehook"):
        setattr(BackwardCFunction, name, _guarding(getattr(BackwardCFunction, name)))


def _guarding(register: Callable[[Any, Hook], Any]) -> Callable[[Any, Hook], Any]:
    @functools.wraps(register)
    def register_guarded(node: Any, hook: Hook) -> Any:
        return register(node, GuardedHook(hook))

    return register_guarded
