"""Fused views: the experts of a layer as one tensor, although a checkpoint stores them one by one.

Separately stored experts do not form a strided tensor, so a fused tensor would need a copy of gigabytes. A `FusedView`
represents it without the copy. It is a real tensor: it can be read, indexed, compared, saved and written to. Every
operation builds the dense tensor temporarily; indexing the first dimension builds only the selected part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from ...checkpoint import mapped_region
from ...devices import HOST

aten = torch.ops.aten


@dataclass(frozen=True)
class PartOfTensor:
    """One tensor, and the index of its place in the whole."""

    value: torch.Tensor
    index: tuple[int | slice, ...]


class FusedView(torch.Tensor):
    """A CPU tensor of the given shape made up of `parts`, plain CPU tensors of one dtype that do not overlap."""

    parts: tuple[PartOfTensor, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[PartOfTensor], shape: Sequence[int]) -> FusedView:
        view: FusedView = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=parts[0].value.dtype)
        view.parts = tuple(parts)
        return view

    def dense(self) -> torch.Tensor:
        """Return a plain copy of the whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=HOST)
        for part in self.parts:
            whole[part.index].copy_(part.value)
        return whole

    def parts_of(self, first: int) -> list[PartOfTensor]:
        """Return the parts of the element `first` of the first dimension. No part spans several elements."""
        found = []
        for part in self.parts:
            position, *rest = part.index
            if position == first:
                found.append(PartOfTensor(part.value, tuple(rest)))
        return found

    def data_ptr(self) -> int:
        """Raise RuntimeError: the elements are not in one place."""
        raise RuntimeError("this tensor consists of several tensors of a checkpoint; use .clone(), which is contiguous")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the first part, which suffices to detect shared memory, its usual purpose."""
        return self.parts[0].value.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the whole as an array."""
        return self.detach().clone().numpy()

    def tolist(self) -> Any:
        """Return the whole as nested lists."""
        return self.detach().clone().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FusedView(shape={tuple(self.shape)}, dtype={self.dtype}, parts={len(self.parts)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return FusedView(args[0].parts, args[0].shape)
        if func is aten.select.int and args[1] in (0, -args[0].dim()):
            return _select(args[0], args[2])
        dense: dict[int, tuple[FusedView, torch.Tensor]] = {}
        plain_args = _plain(args, dense)
        plain_kwargs = {name: _plain(value, dense) for name, value in (kwargs or {}).items()}
        output = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for view, whole in dense.values():
                for part in view.parts:
                    part.value.copy_(whole[part.index])
            if dense and output is not None:
                return args[0]
        return output


def _select(view: FusedView, position: int) -> torch.Tensor:
    size = view.shape[0]
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dimension 0 with size {size}")
    parts = view.parts_of(position % size)
    if len(parts) == 1 and not parts[0].index:
        return parts[0].value.view(view.shape[1:])
    return FusedView(parts, view.shape[1:])


def _plain(value: Any, dense: dict[int, tuple[FusedView, torch.Tensor]]) -> Any:
    """Return `value` with every `FusedView` replaced by its dense copy, and record both in `dense`."""
    if isinstance(value, FusedView):
        return dense.setdefault(id(value), (value, value.dense()))[1]
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, dense) for item in value)
    return value


def lies_on_disk(tensor: torch.Tensor) -> bool:
    """Whether a host tensor views a memory-mapped file."""
    if isinstance(tensor, FusedView):
        return all(mapped_region(part.value) is not None for part in tensor.parts)
    return mapped_region(tensor) is not None
