"""Hooks of a dispatched model, for code that looks for them: a `DispatchedHook` on each module that has an attachment.

Other libraries ask a hook where its module runs, have it return outputs to the inputs' device, or call it to have the
weights on the device before they use these outside of forward. Dispatching itself does not use these hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...devices import DeviceLike, device_key, torch_device
from ...dispatch.attach.refusals import NotCopied
from .align import AlignDevicesHook
from .model_hook import HOOK, ModelHook

if TYPE_CHECKING:
    from ...dispatch.attach.attached_forward import AttachedForward


class DispatchedHook(AlignDevicesHook, NotCopied):
    """Describes the attachment of a dispatched module as an `AlignDevicesHook`.

    Its weights are real tensors wherever they lie, so it says that it offloads nothing. `pre_forward` brings copies of
    them to the execution device, and `post_forward` returns what was written into the copies: for code that uses
    weights outside of their module's forward. In a chain with other hooks it does nothing: the attachment does all.
    Copies of modules leave it out; in a copy of such a chain, a hook that does nothing has its place.

    Args:
        module: The module.
        attachment: Its attachment; None for the root of a model that needs none.
        execution_device: Where the module runs.
    """

    def __init__(
        self,
        module: nn.Module,
        attachment: AttachedForward | None = None,
        execution_device: DeviceLike | None = None,
    ) -> None:
        self._attachment: AttachedForward | None = None  # until the base class has set its defaults
        super().__init__(execution_device, weights_map=ModuleTensors(module))
        self._attachment = attachment

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return ModelHook()

    @property
    def io_same_device(self) -> bool:
        """Whether outputs return to the device that the inputs came from; may be set."""
        return self._attachment is not None and self._attachment.returns_to_input

    @io_same_device.setter
    def io_same_device(self, value: bool) -> None:
        if self._attachment is not None:
            self._attachment.returns_to_input = value

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if getattr(module, HOOK, None) is self:
            self._bring(module)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._return(module)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._return(module)
        return module


class ModuleTensors(Mapping[str, torch.Tensor]):
    """The parameters and buffers that a module holds itself, by name, as they are now.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> torch.Tensor:
        return dict(self._named())[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._named())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._module.named_parameters(recurse=False)
        yield from self._module.named_buffers(recurse=False)


def show_hooks(model: nn.Module) -> Callable[[], None]:
    """Give a dispatched model's root and each of its attached modules a `DispatchedHook`; return what takes them away.

    Modules that have a hook keep it.
    """
    from ...dispatch.attach.dispatched import dispatched

    found = dispatched(model)
    assert found is not None, "the model is not dispatched"
    main = device_key(found.main_device)
    shown: list[nn.Module] = []

    def show(module: nn.Module, attachment: AttachedForward | None) -> None:
        if HOOK not in module.__dict__:
            device = main if attachment is None or attachment.device is None else device_key(attachment.device)
            module.__dict__[HOOK] = DispatchedHook(module, attachment, torch_device(device))
            shown.append(module)

    show(model, found.attachments.get(""))
    for attachment in found.attachments.values():
        show(attachment.module, attachment)

    def hide() -> None:
        for module in shown:
            if isinstance(module.__dict__.get(HOOK), DispatchedHook):
                del module.__dict__[HOOK]

    return hide
