"""Bytes per module, with accelerate's names and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from ...arguments import check_flags, check_model
from .tensors import DtypeLike, tensor_specs, with_ancestors


def compute_module_sizes(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by name; `""` is the whole model.

    A tied tensor counts once in every module that contains one of its names, so the sizes of two children may
    add up to more than their parent's. Modules without tensors are listed with 0.

    Args:
        model: any module, also on meta.
        dtype: floating point tensors count in this dtype, but not with more bytes than now; None: as they are.
        special_dtypes: dtype by parameter or buffer name; takes precedence over `dtype`.
        buffers_only: count buffers only.

    Raises:
        PlanError: the model is not a module, or a dtype is unknown.
    """
    check_model(model)
    check_flags(buffers_only=buffers_only)
    sizes = {name: 0 for name, _ in model.named_modules(remove_duplicate=False)}
    counted: set[tuple[str, int]] = set()
    for spec in tensor_specs(model, dtype, special_dtypes, as_loaded=False):
        if buffers_only and not spec.is_buffer:
            continue
        sizes[spec.name] = spec.nbytes
        for prefix in islice(with_ancestors(spec.name), 1, None):
            if (prefix, spec.storage) not in counted:
                counted.add((prefix, spec.storage))
                sizes[prefix] += spec.nbytes
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
) -> int:
    """Return the bytes of all buffers of `model`, a shared buffer once."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer under `modules` and the names of all layers of that size.

    A layer is a tensor, a module without children, or a module whose class is in `no_split_module_classes`.
    """
    from .units import as_class_names

    classes = as_class_names(no_split_module_classes)
    largest = 0
    names: list[str] = []
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in classes:
            stack.extend((f"{name}.{child}", value) for child, value in reversed(children))
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and those of its largest layer with the names of all layers of that size."""
    from .units import find_no_split_classes

    sizes = compute_module_sizes(model)
    direct: list[tuple[str, nn.Module | torch.Tensor]] = [*model.named_parameters(recurse=False)]
    direct += [*model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(direct, sizes, sorted(find_no_split_classes(model)))
