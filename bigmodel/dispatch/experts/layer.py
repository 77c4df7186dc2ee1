"""The experts of one layer: on the host, fused tensors whose first dimension counts the experts; for a call, a stand-in
for their module that has other tensors in their place.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from ..weights.block import Block, HostTensor
from ..weights.fused_view import FusedView, PartOfTensor, lies_on_disk
from ..weights.layout import Layout, Place


class ExpertLayer:
    """One module's experts. Each is a block that can be fetched by itself.

    Args:
        name: The module's name in the model.
        tensors: Its fused tensors by parameter name.
    """

    def __init__(self, name: str, tensors: dict[str, HostTensor]) -> None:
        self.name = name
        self.tensors = tensors
        self.names = list(tensors)
        self.fused = Block(name, list(tensors.values()))
        self.experts: int = self.fused.tensors[0].value.shape[0]
        self.layout = Layout.of((t.device_dtype, t.value.shape[1:]) for t in self.fused.tensors)
        self._blocks: dict[int, Block] = {}
        self._replacements = 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as it lies on the host."""
        return sum(t.value.nbytes for t in self.fused.tensors) // self.experts

    @property
    def whole_bytes(self) -> int:
        """Bytes of a slot that would hold all experts at once."""
        return Layout.of((t.device_dtype, t.value.shape) for t in self.fused.tensors).nbytes

    @property
    def on_disk(self) -> bool:
        """Whether the experts are views of memory-mapped files."""
        return any(lies_on_disk(tensor.value) for tensor in self.fused.tensors)

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two layers whose experts fit the same slots."""
        return tuple(zip(self.names, self.layout.places))

    def version(self) -> tuple[int, int]:
        """Return a value that changes when a host tensor is written in place or replaced."""
        if self.fused.adopt_replaced():
            self._blocks.clear()
            self._replacements += 1
        return self._replacements, self.fused.version()

    def block(self, expert: int) -> Block:
        """Return one expert as a block, laid out as `layout` says."""
        if expert not in self._blocks:
            # A block outlives the forward that asks for it first: its views are no inference tensors, which count no
            # versions, even if that forward runs in inference mode.
            with torch.inference_mode(False):
                self._blocks[expert] = self._made(expert)
        return self._blocks[expert]

    def _made(self, expert: int) -> Block:
        tensors: list[HostTensor] = []
        places: list[Place] = []
        for fused, place in zip(self.fused.tensors, self.layout.places):
            for part in _parts(fused.value.detach(), expert):
                tensors.append(HostTensor(part.value, fused.device_dtype))
                places.append(_place_of(part, place))
        block = Block(f"{self.name}.{expert}", tensors)
        block.layout = Layout(tuple(places), self.layout.nbytes)
        return block

    def as_plain_block(self) -> Block:
        """Return all experts as one block of tensors that lie in one place each."""
        tensors = []
        for fused in self.fused.tensors:
            value = fused.value.detach()
            values = [part.value for part in value.parts] if isinstance(value, FusedView) else [value]
            tensors += [HostTensor(plain, fused.device_dtype) for plain in values]
        return Block(self.name, tensors)

    def rows(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return by name the fused tensors that lie in `memory`, uint8 of shape (experts, bytes of `layout`)."""
        return {
            name: memory[:, place.offset : place.offset + place.nbytes].view(place.dtype).view(-1, *place.shape)
            for name, place in zip(self.names, self.layout.places)
        }

    def pin(self) -> None:
        """Move fused tensors that lie in memory into pinned memory, each staying the Parameter that it is."""
        for tensor in self.fused.tensors:
            if not lies_on_disk(tensor.value) and not tensor.value.is_pinned():
                tensor.value.data = tensor.value.data.contiguous().pin_memory()


def _parts(value: torch.Tensor, expert: int) -> list[PartOfTensor]:
    """Return the tensors that an expert's share of the fused tensor `value` consists of."""
    return value.parts_of(expert) if isinstance(value, FusedView) else [PartOfTensor(value[expert], ())]


def _place_of(part: PartOfTensor, whole: Place) -> Place:
    """Return where a part of one expert's tensor lies, given where that tensor does. Parts are runs of its rows."""
    if not part.index:
        return whole
    (rows,) = part.index
    assert isinstance(rows, slice)
    row_bytes = whole.dtype.itemsize * prod(whole.shape[1:])
    start, stop, _ = rows.indices(whole.shape[0])
    return Place(whole.offset + start * row_bytes, (stop - start) * row_bytes, whole.dtype, part.value.shape)


def stand_in(module: nn.Module, **attributes: Any) -> Any:
    """Return the class's own forward, bound to an object that is `module` in all but `attributes`.

    Args:
        module: Left as it is.
        attributes: What is different; may stand in the place of parameters.
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update(attributes)
    other.__dict__.pop("forward", None)
    return type(module).forward.__get__(other)
