"""Refusals of a dispatched model: copies, pickles, traces, and conversions by ``.to()`` and similar methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container
from typing import Any

import torch
from torch import nn

from ...errors import DispatchError
from ..weights.parameters import cast_in_forward


class NotCopied:
    """Base of what dispatching adds to a model: a dispatched model cannot be pickled; copies leave these out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._refuse()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._refuse()

    def _refuse(self) -> Any:
        raise DispatchError(
            "a dispatched model cannot be pickled, nor a part of it: its weights are spread over devices and streams "
            "belong to this process. Use copy.deepcopy, call undispatch(model) first, or save it with "
            "save_model(model, directory)"
        )


class NotTracedError(DispatchError, AttributeError):
    """A dispatched model was asked for the code of its forward. Also an AttributeError, as it has none to give."""


NOT_TRACED = (
    "a dispatched model cannot be exported, scripted or traced: its weights are copied to their device while it runs. "
    "Call undispatch(model) first; torch.compile works as it is"
)


TRACED = "_slow_forward"
"""The method of a module that calls run in the place of its forward while `torch.jit.trace` records."""


class RefuseTracing(NotCopied):
    """Replaces ``module._slow_forward``: a trace would hold the copies of the weights that it was made with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DispatchError(NOT_TRACED)


class RefuseConversion(NotCopied):
    """Replaces ``module._apply``, which ``.to()``, ``.cuda()``, ``.half()`` and similar methods call.

    Libraries move a model to the device that it is on before they use it. That changes nothing, and is accepted. So is
    a cast of weights that are being computed with: some models cast a part of themselves in their forward. It holds
    for that forward where weights are streamed, and from then on where they are resident. Streamed weights that are
    cast so cannot be trained.

    Args:
        module: The module, or a part of it.
        devices: The model's main device and the device of its first parameter: what is taken for the model's device.
        computing_on: Returns the device on which the calling thread computes with a module, if it is in the forward of
            one around it.
        streamed: The registries of streamed tensors, by id, with their keys.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Collection[torch.device],
        computing_on: Callable[[nn.Module], torch.device | None] = lambda _: None,
        streamed: Container[tuple[int, str]] = (),
    ) -> None:
        self._module = weakref.ref(module)
        self._devices = devices
        self._computing_on = computing_on
        self._streamed = streamed

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None, "the module is gone"
        dtypes = {tensor.dtype for tensor in (*module.parameters(recurse), *module.buffers(recurse))}
        if all(self._changes_nothing(convert, dtype) for dtype in dtypes):
            return module
        device = self._computing_on(module)
        if device is not None and recurse and cast_in_forward(module, convert, device, self._streamed):
            return module
        raise DispatchError(
            "a dispatched model cannot be moved or cast: parts of it live on several devices or are streamed. "
            "For another dtype give dtype= to from_pretrained or load_checkpoint_and_dispatch, or cast the model "
            "before dispatch_model; for another place, dispatch it again with another device_map; for a plain model, "
            "undispatch(model)"
        )

    def _changes_nothing(self, convert: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether a tensor on one of the devices stays the tensor that it is."""
        tensors = (torch.empty(0, dtype=dtype, device=device) for device in self._devices)
        try:
            return any(convert(tensor) is tensor for tensor in tensors)
        except (AssertionError, RuntimeError):  # there is no such device
            return False
