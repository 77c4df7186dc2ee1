"""Build modules without memory for their weights, or straight on a device.

    with init_empty_weights():
        model = Model(config)       # parameters on meta, buffers real

Both contexts affect the calling thread only; other threads may build modules at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .forks import new_lock
from .names import DeviceLike, torch_device

_Register = Callable[[nn.Module, str, nn.Parameter | None], None]


class _Redirect(threading.local):
    """The device on which the calling thread registers parameters; None leaves each where it was created."""

    device: torch.device | None = None


_redirect = _Redirect()
_lock = new_lock()
_users = 0
_original: _Register = nn.Module.register_parameter


class _SkipInitialization(TorchFunctionMode):
    """Skips operations that only write values into a tensor, when it is on meta.

    They would change nothing there, but each costs a shape computation in Python for every weight of the model.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", None) in _INITIALIZERS:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


# By name: libraries replace the functions of torch.nn.init by their own.
_INITIALIZERS = {
    "clamp_",
    "constant_",
    "erfinv_",
    "fill_",
    "kaiming_uniform_",
    "normal_",
    "uniform_",
    "zero_",
}


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Have the calling thread build modules whose parameters take no memory (device ``meta``), within this context.

    Args:
        include_buffers: Put buffers on ``meta`` too. By default they are real, since modules often compute them in
            ``__init__`` and checkpoints do not contain them.
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: DeviceLike, include_buffers: bool | None = None) -> Iterator[None]:
    """Have the calling thread build modules whose parameters are on `device`, within this context.

    Args:
        device: The device to which each parameter moves when it is registered.
        include_buffers: Create every new tensor there, buffers included.
    """
    target = torch_device(device)
    if include_buffers:
        with target:
            yield
        return
    previous = _redirect.device
    _redirect.device = target
    _install()
    try:
        with _SkipInitialization():
            yield
    finally:
        _redirect.device = previous
        _uninstall()


def _install() -> None:
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = nn.Module.register_parameter  # may already be replaced by another library
            nn.Module.register_parameter = _register_parameter  # type: ignore[method-assign,assignment]


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            nn.Module.register_parameter = _original  # type: ignore[method-assign,assignment]


def _register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _original(module, name, param)
    target = _redirect.device
    if param is not None and target is not None and param.device != target:
        module._parameters[name] = _moved(param, target)


def _moved(param: nn.Parameter, target: torch.device) -> nn.Parameter:
    """Return `param` on `target`, of the same class and with the same attributes."""
    data = param.detach().to(target)
    if type(param) is nn.Parameter:
        moved = nn.Parameter(data, requires_grad=param.requires_grad)
    else:
        moved = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    moved.__dict__.update(param.__dict__)
    return moved
