"""Restoring a weight in a dry run: one operation, ``bigmodel::restore``, with the memory and the work of all of them. A
product with a packed weight is one, too.

A dry run of a large mixture would spend most of its time on the many small operations of restoring. What they take
depends on the format, the shapes and the kind of device only, so it is measured once for each of these, on meta
tensors, and kept.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...devices import HOST
from .nibbles import MEASURED_FOR

_library = torch.library.Library("bigmodel", "DEF")
_library.define("restore(Tensor(a!) out, Tensor[] stored, int moved) -> ()")
torch.library.register_fake("bigmodel::restore", lambda out, stored, moved: None, lib=_library)

_library.define("packed_product(Tensor input, int rows, str kernel) -> Tensor")
torch.library.register_fake(
    "bigmodel::packed_product",
    lambda input, rows, kernel: input.new_empty((*input.shape[:-1], rows)),
    lib=_library,
)

RESTORE: Any = torch.ops.bigmodel.restore.default
"""restore(out, stored, moved): stands for restoring a weight, in dry runs. `moved` is the bytes that are read and
written."""

PRODUCT: Any = torch.ops.bigmodel.packed_product.default
"""packed_product(input, rows, kernel): stands for a product with a packed weight of so many rows, in dry runs."""


class Restores(Protocol):
    """The part of a `WeightFormat` that restores rows of a weight."""

    def __hash__(self) -> int: ...

    def rows(
        self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype
    ) -> torch.Tensor: ...


def record_restoring(
    format: Restores, out: torch.Tensor, tensors: Mapping[str, torch.Tensor], rows_at_once: int
) -> None:
    """Let a dry run record that a weight is restored into `out`.

    Args:
        format: the weight's format.
        out: a fake tensor, (out, in).
        tensors: the stored tensors, fake ones, by leaf.
        rows_at_once: rows that are restored at once.
    """
    layout = tuple((leaf, tuple(tensor.shape), tensor.dtype) for leaf, tensor in tensors.items())
    shape = (int(out.shape[0]), int(out.shape[1]))
    scratch, moved = _cost(format, layout, shape, out.dtype, out.device, rows_at_once)
    if out.device.type == HOST:  # intermediate results stay in the processor's caches
        moved = out.nbytes + sum(tensor.nbytes for tensor in tensors.values())
    intermediate = torch.empty(scratch, dtype=torch.uint8, device=out.device)
    RESTORE(out, list(tensors.values()), moved)
    del intermediate


@lru_cache(maxsize=4096)
def _cost(
    format: Restores,
    layout: tuple[tuple[str, tuple[int, ...], torch.dtype], ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    rows_at_once: int,
) -> tuple[int, int]:
    """Return the peak bytes of the intermediate results of restoring a weight, and the bytes that are moved."""
    token = MEASURED_FOR.set(device)
    try:
        with _disable_current_modes():
            tensors = {leaf: torch.empty(each, dtype=kind, device="meta") for leaf, each, kind in layout}
            out = torch.empty(rows_at_once, shape[1], dtype=dtype, device="meta")
            with _Watch([out, *tensors.values()]) as watch:
                out.copy_(format.rows(tensors, shape, 0, rows_at_once, dtype))
    finally:
        MEASURED_FOR.reset(token)
    return watch.peak, watch.moved * math.ceil(shape[0] / rows_at_once)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, which are nested in sequences at most."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for member in value for each in _tensors_in(member)] if isinstance(value, (list, tuple)) else []


class _Watch(TorchDispatchMode):
    """Adds up the bytes of new storages while they live, and those that operations read and write."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self.moved = self._now = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = _tensors_in(output)
        for tensor in made:
            self._add(tensor)
        if not func.is_view:
            self.moved += sum(tensor.nbytes for tensor in [*_tensors_in(args), *made])
        return output

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive and key not in self._known and nbytes:
            self._alive[key] = weakref.ref(storage, self._end_of(key, nbytes))
            self._now += nbytes
            self.peak = max(self.peak, self._now)

    def _end_of(self, key: int, nbytes: int) -> Callable[[object], None]:
        def ended(_: object) -> None:
            self._now -= nbytes
            self._alive.pop(key, None)

        return ended
