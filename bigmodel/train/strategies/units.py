"""What is sharded as one: the modules whose parameters are gathered and freed together."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.strategies.fsdp_plugin import FullyShardedDataParallelPlugin


def units_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """The units of `model`, inner ones before the ones around them, the model itself not among them.

    Raises:
        TrainError: the policy names classes that the model does not have, or needs names and got none.
    """
    is_unit = _policy(model, plugin)
    found = [module for module in model.modules() if module is not model and is_unit(module)]
    return found[::-1]


def ignored_parameters(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[nn.Parameter]:
    """The parameters of `plugin.ignored_modules`."""
    ignored = plugin.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        modules = [module for name, module in model.named_modules() if name and pattern.fullmatch(name)]
    else:
        modules = list(ignored)
    return {parameter for module in modules for parameter in module.parameters()}


def block_classes(model: nn.Module) -> set[str]:
    """Class names of the blocks: those the model names (`_no_split_modules`), else the repeated members of lists."""
    named = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    if named:
        return named & {type(module).__name__ for module in model.modules()}
    repeated: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            repeated.update(type(child).__name__ for child in module if any(True for _ in child.children()))
    return {name for name, count in repeated.items() if count > 1}


def _policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Callable[[nn.Module], bool]:
    policy = plugin.auto_wrap_policy
    if callable(policy):
        return _user_policy(policy)
    if policy == "NO_WRAP":
        return lambda module: False
    if policy == "SIZE_BASED_WRAP":
        return _by_size(model, plugin.min_num_params or 0)
    names = _class_names(model, plugin)
    return lambda module: type(module).__name__ in names


def _class_names(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[str]:
    asked = set(plugin.transformer_cls_names_to_wrap or ())
    if not asked:
        found = block_classes(model)
        if not found and plugin.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
            raise TrainError(
                f"{type(model).__name__} does not say what its blocks are; "
                "name their classes in transformer_cls_names_to_wrap"
            )
        return found
    missing = asked - {type(module).__name__ for module in model.modules()}
    if missing:
        raise TrainError(f"{type(model).__name__} has no module of class {', '.join(sorted(missing))}")
    return asked


def _by_size(model: nn.Module, minimum: int) -> Callable[[nn.Module], bool]:
    """Modules that own at least `minimum` parameters not already in an inner unit."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if left < minimum or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return left
        chosen.add(id(module))
        return 0

    visit(model)
    return lambda module: id(module) in chosen


def _user_policy(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    """FSDP1's policies take (module, recurse, nonwrapped_numel); ours take the module."""
    names = set(inspect.signature(policy).parameters)
    if "recurse" in names:
        return lambda m: bool(policy(module=m, recurse=False, nonwrapped_numel=sum(p.numel() for p in m.parameters())))
    return lambda module: bool(policy(module))
