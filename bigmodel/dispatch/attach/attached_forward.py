"""The attachment: the object that replaces a module's forward while its model is dispatched."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ...devices.nested import are_all_on, first_tensor, send_to_device
from ...errors import DispatchError
from ..mapped.mapped_block import MappedBlock
from ..mapped.readahead import ReadAhead
from ..streaming.gradients import Compute, run_with_gradients
from ..streaming.streamer import Streamer
from ..weights.block import Block
from .host_or_device import HostOrDevice
from .input_transfer import InputTransfer
from .untraced import leave_untraced

UNTRACED = ("bigmodel.devices", "bigmodel.profile", "bigmodel.checkpoint", "bigmodel.dispatch")
"""Packages that torch.compile does not trace: of a dispatched model it compiles only the modules' own forwards. Each
attached module breaks the graph once; its forward is a separate graph, which modules of the same kind share."""


def refuse_copy(*_: object) -> Any:
    """Raise DispatchError: a dispatched model can be neither copied nor pickled."""
    raise DispatchError(
        "a dispatched model cannot be copied or pickled: its weights are spread over devices and streams belong to "
        "this process. Call undispatch(model) first, or save it with save_model(model, directory)"
    )


class AttachedForward:
    """Replaces ``module.forward``, or another method: moves inputs to the module's device and streams its weights while
    the method runs.

    The module is referenced weakly, to avoid a reference cycle.

    Args:
        module: The module whose forward is replaced.
        device: Execution device; inputs are moved there. None leaves inputs on their devices.
        skip_keys: Keyword arguments that are never moved.
        method: The name of the method that is replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        skip_keys: Collection[str] | None,
        method: str = "forward",
    ) -> None:
        self._module = weakref.ref(module)
        self.method = method
        self._own: Callable[..., Any] | None = module.__dict__.get(method)
        self._function: Callable[..., Any] = getattr(type(module), method)
        functools.update_wrapper(self, self._own or self._function)
        self.__dict__.pop("__wrapped__")
        self.__signature__ = inspect.signature(getattr(module, method))
        self.device = device
        self.skip_keys = set(skip_keys or ())
        self.blocks: list[tuple[Streamer, Block]] = []
        self.compute: Compute | None = None
        """Replaces the module's own forward, as for experts; None: the module's own."""
        self.host_or_device: HostOrDevice | None = None
        """Decides the device of each call; None: always `device`."""
        self.ahead: tuple[ReadAhead, MappedBlock] | None = None
        """Pages in mapped weights before the module computes with them."""
        self.weights_follow = False
        """Whether the module's own weights stay on the host, beside an accelerator, and follow their other operands."""
        self.returns_to_input = False
        self.moved_inputs = False
        """Inputs have been brought from another device."""
        self.output_device: torch.device | None = None
        self.output_dtype: torch.dtype | None = None

    def attach(self) -> None:
        """Replace the module's forward."""
        leave_untraced(UNTRACED)
        self.module.__dict__[self.method] = self

    def detach(self) -> None:
        """Restore the module's own forward."""
        module = self._module()
        if module is None:
            return
        if self._own is not None:
            module.__dict__[self.method] = self._own
        else:
            module.__dict__.pop(self.method, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        source = first_tensor((args, kwargs)) if self.returns_to_input else None
        if self.host_or_device is not None:
            output = self._run_on_chosen_device(self.host_or_device, args, kwargs)
        elif self.device is None or (are_all_on(args, self.device) and are_all_on(kwargs.values(), self.device)):
            output = self._run(args, kwargs) if self.ahead is None else self._run_in_memory(self.ahead, args, kwargs)
        else:
            output = self._run_on(self.device, self._run_resident, args, kwargs)
        if self.output_dtype is not None:
            output = output.to(self.output_dtype)
        target = source.device if source is not None else self.output_device
        return output if target is None else send_to_device(output, target, skip_keys=self.skip_keys)

    def _run_on(self, device: torch.device, run: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run with the arguments brought to `device`, and what is written into them brought back."""
        transfer = InputTransfer(device, self.skip_keys)
        args, kwargs = transfer.send(args, kwargs)
        if not transfer.moved:
            return run(args, kwargs)
        self.moved_inputs = True
        return transfer.bring_back(run(args, kwargs))

    def _run_resident(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs) if self.ahead is None else self._run_in_memory(self.ahead, args, kwargs)

    def _run_on_chosen_device(self, host_or_device: HostOrDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.device is not None
        device = host_or_device.device_of(args, kwargs, self.device)
        on_host = device != self.device
        host_or_device.move_cache(args, kwargs, device)
        run = self.plain if on_host else self._run
        return host_or_device.visit(on_host, lambda _: self._run_on(device, run, args, kwargs))

    def _run_in_memory(
        self, ahead: tuple[ReadAhead, MappedBlock], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reader, block = ahead
        return reader.visit(block, lambda _: self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: Compute = self.compute or self.plain
        for streamer, block in self.blocks:
            if torch.is_grad_enabled():
                run = functools.partial(run_with_gradients, streamer, block, self.module, run)
            else:
                run = functools.partial(streamer.run, block, run)
        return run(args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The module whose forward is replaced."""
        module = self._module()
        assert module is not None, "the module is gone"
        return module

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what was replaced."""
        if self._own is not None:
            return self._own(*args, **kwargs)
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_copy()


class RefuseConversion:
    """Replaces ``module._apply``, which ``.to()``, ``.cuda()``, ``.half()`` and similar methods call.

    Libraries move a model to the device that it is on before they use it. That changes nothing, and is accepted.

    Args:
        module: The module, or a part of it.
        devices: The model's main device and the device of its first parameter: what is taken for the model's device.
    """

    def __init__(self, module: nn.Module, devices: Collection[torch.device]) -> None:
        self._module = weakref.ref(module)
        self._devices = devices

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None, "the module is gone"
        dtypes = {tensor.dtype for tensor in (*module.parameters(recurse), *module.buffers(recurse))}
        if all(self._changes_nothing(convert, dtype) for dtype in dtypes):
            return module
        raise DispatchError(
            "a dispatched model cannot be moved or cast: parts of it live on several devices or are streamed. "
            "Call undispatch(model) first, or dispatch it again with another device_map or dtype"
        )

    def _changes_nothing(self, convert: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether a tensor on one of the devices stays the tensor that it is."""
        tensors = (torch.empty(0, dtype=dtype, device=device) for device in self._devices)
        try:
            return any(convert(tensor) is tensor for tensor in tensors)
        except (AssertionError, RuntimeError):  # there is no such device
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_copy()
