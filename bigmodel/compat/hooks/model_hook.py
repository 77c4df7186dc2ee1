"""The protocol of hooks: what a hook may do around a module's forward, and how it is put there and removed.

A hooked module has the hook as ``_hf_hook`` and what was its forward as ``_old_forward``: other libraries read both.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn

from ...dispatch.attach.mark import is_dispatched
from ...dispatch.attach.untraced import leave_untraced

HOOK = "_hf_hook"
PLAIN_FORWARD = "_old_forward"

_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Methods that others may have replaced on a dispatched model to warn its users; removed with its hook."""


class ModelHook:
    """A hook that does nothing: the base class of hooks.

    Attributes:
        no_grad: Run the module's forward without recording gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added to `module`; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before forward; returns the arguments that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward; returns what the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed from `module`; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks in one: each event goes to all of them, in their order.

    Args:
        hooks: The hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class HookedForward:
    """Replaces a module's forward: runs the module's hook around what was there before.

    Copied and pickled with its module, unlike a function.

    Args:
        module: The hooked module; its hook is looked up in each call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        replaced = getattr(module, PLAIN_FORWARD)
        self.__name__ = getattr(replaced, "__name__", "forward")
        self.__doc__ = getattr(replaced, "__doc__", None)
        self.__signature__ = inspect.signature(replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_with_hook(self.module, *args, **kwargs)


def run_with_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the hook of `module` around what its forward was."""
    hook: ModelHook = getattr(module, HOOK)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    forward = getattr(module, PLAIN_FORWARD)
    if hook.no_grad:
        with torch.no_grad():
            output = forward(*args, **kwargs)
    else:
        output = forward(*args, **kwargs)
    return hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run `hook` around each forward of `module`, and return the module.

    On a dispatched module the hook runs around the dispatched forward.

    Args:
        append: Run it after the hook that the module already has; by default it replaces that.
    """
    leave_untraced(("bigmodel.compat",))
    present: ModelHook | None = getattr(module, HOOK, None)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    if not (hasattr(module, HOOK) and hasattr(module, PLAIN_FORWARD)):
        module._old_forward = module.forward  # type: ignore[assignment]
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    if isinstance(module, fx.GraphModule):
        # Its class is its own; a forward in its `__dict__` would hide what recompiling writes into the class.
        type(module).forward = run_with_hook
    else:
        module.forward = HookedForward(module)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of `module`, restore its forward, and return it. A dispatched model becomes a plain one.

    Args:
        recurse: Also remove the hooks of all modules in it.
    """
    hook: ModelHook | None = module.__dict__.pop(HOOK, None)
    if hook is not None:
        hook.detach_hook(module)
    _restore_forward(module)
    if is_dispatched(module):
        from ...dispatch import undispatch

        device_map = module.__dict__["hf_device_map"]
        undispatch(module)
        # accelerate leaves it, too: by it peft knows that it has to dispatch the model again, with its adapters.
        module.__dict__["hf_device_map"] = device_map
    for name in _MOVES:
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of `module` and of all modules in it."""
    remove_hook_from_module(module, recurse=True)


def _restore_forward(module: nn.Module) -> None:
    replaced = module.__dict__.pop(PLAIN_FORWARD, None)
    if replaced is None:
        return
    if isinstance(module, fx.GraphModule):
        type(module).forward = replaced.__func__
        return
    from ...dispatch.attach.attached_forward import AttachedForward

    of_class = getattr(replaced, "__self__", None) is module
    present = module.__dict__.get("forward")
    if isinstance(present, AttachedForward):  # dispatched after the hook was added
        present.replace_own(None if of_class else replaced)
    elif of_class:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = replaced
