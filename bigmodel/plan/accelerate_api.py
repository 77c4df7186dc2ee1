"""Accelerate's functions that make device maps, with accelerate's signatures.

Libraries import these functions long before they call them, if they ever do, so the first call imports the planner
(`greedy_map`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..devices import DeviceLike

if TYPE_CHECKING:
    from ..profile import DtypeLike


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, int | str]:
    """Return a device map that fills accelerators in order, then RAM, then disk. Counts weights only.

    It differs from accelerate's: bytes of the largest streamed layer are reserved only if a layer is streamed; layers
    after one that does not fit an accelerator are placed on it if they fit; buffers and parameters that a split module
    holds itself are placed, too; classes that must not be split are found if none are given. `make_plan` also counts KV
    cache and activations, and predicts time.

    Args:
        model: any module, also on meta.
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given.
        no_split_module_classes: class names not to be split; None: find them; `[]`: split down to leaf modules.
        dtype: floating point tensors count in this dtype, but not with more bytes than now.
        special_dtypes: dtype by tensor name; takes precedence over `dtype`.
        verbose: log every decision.
        clean_result: replace siblings on one device by their parent.
        offload_buffers: False: buffers of units that are not resident count on the main device.
        fallback_allocation: if no block fits an accelerator, split blocks, unless classes are given. Layers after one
            that does not fit are tried in any case.

    Raises:
        BudgetError: nothing fits, because `"disk"` was given a budget that is too small.
        PlanError: an argument is invalid; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget is given for an unknown device.
    """
    from .greedy_map import infer_auto_device_map

    return infer_auto_device_map(
        model,
        max_memory,
        no_split_module_classes,
        dtype,
        special_dtypes,
        verbose,
        clean_result,
        offload_buffers,
        fallback_allocation,
    )


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return budgets under which filling the accelerators in order spreads the model evenly over them.

    They are the smallest caps under which everything fits in order. The budgets are unchanged if the model does not
    fit all accelerators together.

    Args:
        model: any module, also on meta.
        max_memory: budgets as `get_max_memory` takes them; None: what is free.
        no_split_module_classes: class names not to be split; None: find them.
        dtype: floating point tensors count as this dtype.
        special_dtypes: dtype by tensor name; takes precedence over `dtype`.
        low_zero: keep the first accelerator as empty as possible, for other work such as generation.

    Raises:
        PlanError: an argument is invalid; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget is given for an unknown device.
    """
    from .greedy_map import get_balanced_memory

    return get_balanced_memory(model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero)
