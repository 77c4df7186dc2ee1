"""Modules as a tree: repeated blocks, compiling them in place, and children before parents."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether `module` is a list of modules of one class."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(each, type(module[0])) for each in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a list of modules of one class is anywhere in `module`; a module without children has none."""
    return bool(module._modules) and any(map(is_repeated_blocks, module.modules()))


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile in place each repeated block of the module of a DeepSpeed engine, and each part that holds none.

    Args:
        compile_kwargs: Of `torch.nn.Module.compile`.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_deepspeed(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile in place each repeated block, and each part that holds none; return `module`.

    Hooks that `fully_shard` adds afterwards run, since modules keep their ``__call__``.
    """
    compile_regions_deepspeed(module, **compile_kwargs)
    return module


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of `model`, each after those that it holds; the last is `model`.

    Args:
        return_fqns: Return pairs of dotted name and module; the name of `model` is "".
    """
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    found: list[tuple[str, nn.Module]] = []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        waiting += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    found.reverse()
    return found if return_fqns else [module for _, module in found]
