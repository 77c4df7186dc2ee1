"""The blocks of a model: the modules that it is a sequence of, by the names of their classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from bigmodel.errors import TrainError


def block_classes(model: nn.Module) -> set[str]:
    """Return class names of the blocks: the model's `_no_split_modules`, else the repeated members of its lists."""
    named = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    if named:
        return named & {type(module).__name__ for module in model.modules()}
    repeated: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            repeated.update(type(child).__name__ for child in module if any(True for _ in child.children()))
    return {name for name, count in repeated.items() if count > 1}


def class_names(model: nn.Module, asked: Collection[str], must: bool) -> set[str]:
    """Return the class names of the blocks of `model`: those asked for, else those found.

    Args:
        asked: Class names; none: find them.
        must: Whether it is an error to find none.

    Raises:
        TrainError: The model has no module of a class that is asked for, or its blocks are unknown.
    """
    if not asked:
        found = block_classes(model)
        if must and not found:
            raise TrainError(
                f"the blocks of {type(model).__name__} are unknown; name their classes in transformer_cls_names_to_wrap"
            )
        return found
    missing = set(asked) - {type(module).__name__ for module in model.modules()}
    if missing:
        raise TrainError(f"{type(model).__name__} has no module of class {', '.join(sorted(missing))}")
    return set(asked)
