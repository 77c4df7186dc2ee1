"""The experts of one layer: fused tensors on the host, indexed by expert in their first dimension, and a stand-in for
their module with other tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from ...devices.pinned import is_pinned, pinned_weights
from ..weights.block import Block, HostTensor
from ..weights.fused_view import FusedView, PartOfTensor, lies_on_disk
from ..weights.layout import Layout, Place
from ..weights.outside_use import host_value, is_given_out, note_exposure


class ExpertLayer:
    """One module's experts, each a block that can be fetched separately.

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
        """Bytes of one expert on the host."""
        return sum(t.value.nbytes for t in self.fused.tensors) // self.experts

    @property
    def whole_bytes(self) -> int:
        """Bytes of a packed buffer of all experts."""
        return Layout.of((t.device_dtype, t.value.shape) for t in self.fused.tensors).nbytes

    @property
    def on_disk(self) -> bool:
        """Whether the experts are views of memory-mapped files."""
        return any(lies_on_disk(tensor.value) for tensor in self.fused.tensors)

    @property
    def on_host(self) -> bool:
        """Whether the host can compute with the experts: they lie whole in its memory, in the dtype of the device."""
        return not self.on_disk and all(
            tensor.value.dtype == tensor.device_dtype and not isinstance(tensor.value, FusedView)
            for tensor in self.fused.tensors
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """Names and layout of an expert's tensors; layers with equal signatures can share a cache."""
        return tuple(zip(self.names, self.layout.places))

    def version(self) -> tuple[int, int]:
        """Return a value that changes when a host tensor may have been written to or was replaced."""
        for tensor in self.fused.tensors:
            if is_given_out(tensor.value):
                note_exposure(tensor.value)
        exposed = [tensor.exposures for tensor in self.fused.tensors]
        replaced, version = self.fused.adopt_replaced()
        if replaced:
            self._blocks.clear()
            self._replacements += 1
        elif exposed != [tensor.exposures for tensor in self.fused.tensors]:
            self._blocks.clear()  # ``.data = ...`` may have given a tensor other memory than blocks are views of
        return self._replacements, version

    def block(self, expert: int) -> Block:
        """Return one expert as a block with the layout `layout`."""
        if expert not in self._blocks:
            # A block outlives the forward that creates it. Its views must not be inference tensors, which have no
            # version counter, even if that forward runs in inference mode.
            with torch.inference_mode(False):
                self._blocks[expert] = self._make_block(expert)
        return self._blocks[expert]

    def _make_block(self, expert: int) -> Block:
        tensors: list[HostTensor] = []
        places: list[Place] = []
        for fused, place in zip(self.fused.tensors, self.layout.places):
            for part in _parts(host_value(fused.value), expert):
                tensors.append(HostTensor(part.value, fused.device_dtype))
                places.append(_place_of(part, place))
        block = Block(f"{self.name}.{expert}", tensors)
        block.layout = Layout(tuple(places), self.layout.nbytes)
        return block

    def as_plain_block(self) -> Block:
        """Return all experts as one block of plain tensors, without fused views."""
        tensors = []
        for fused in self.fused.tensors:
            value = host_value(fused.value)
            values = [part.value for part in value.parts] if isinstance(value, FusedView) else [value]
            tensors += [HostTensor(plain, fused.device_dtype) for plain in values]
        return Block(self.name, tensors)

    def rows(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fused tensors, by name, as views of `memory`, uint8 of shape (experts, bytes of `layout`)."""
        return {
            name: memory[:, place.offset : place.offset + place.nbytes].view(place.dtype).view(-1, *place.shape)
            for name, place in zip(self.names, self.layout.places)
        }

    @property
    def in_memory(self) -> list[torch.Tensor]:
        """Its fused tensors that lie in host memory, not in files."""
        return [tensor.value for tensor in self.fused.tensors if not lies_on_disk(tensor.value)]

    def pin(self) -> None:
        """Move fused tensors that are in memory into pinned memory; Parameters stay the same objects."""
        for tensor in self.in_memory:
            if not is_pinned(tensor):
                tensor.data = pinned_weights(tensor.data)


def _parts(value: torch.Tensor, expert: int) -> list[PartOfTensor]:
    """Return the tensors that make up an expert's slice of the fused tensor `value`."""
    return value.parts_of(expert) if isinstance(value, FusedView) else [PartOfTensor(value[expert], ())]


def _place_of(part: PartOfTensor, whole: Place) -> Place:
    """Return the place of a part, a range of rows, of one expert's tensor, given the place of that tensor."""
    if not part.index:
        return whole
    (rows,) = part.index
    assert isinstance(rows, slice)
    row_bytes = whole.dtype.itemsize * prod(whole.shape[1:])
    start, stop, _ = rows.indices(whole.shape[0])
    return Place(whole.offset + start * row_bytes, (stop - start) * row_bytes, whole.dtype, part.value.shape)


def stand_in(module: nn.Module, **attributes: Any) -> Any:
    """Return the class's own forward, bound to a shallow copy of `module` with other `attributes`.

    Args:
        module: Not changed.
        attributes: Attributes of the copy; may replace parameters.
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update(attributes)
    other.__dict__.pop("forward", None)
    return type(module).forward.__get__(other)
