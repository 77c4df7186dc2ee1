"""Products on the host with quantised weights as they are packed, by PyTorch's kernels.

A weight that is restored in each forward is read, written and read again. PyTorch's kernels read its integers alone.
They sum in float32 and round to bfloat16, but in another order than a product with the restored weight, and they do not
round the products of integers and scales: outputs differ from that in their last bits.

Weights of 4 bits are copied once into the layout of their kernel; those of 8 bits are used where they lie, or copied
once if their file does not align them. The kernel for 8 bits reads short rows slowly, so two or four of them are given
to it as one, beside inputs that are zero in the others' places. Calls of many rows, such as prompts, restore the weight
once and are exact: the kernels are slower for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..devices import HOST
from ..limits import VECTOR_BYTES
from .formats.format import Tensors, WeightFormat
from .formats.restoring import PRODUCT

EXACT, PACKED = "exact", "packed"
HOST_KERNELS = (EXACT, PACKED)
"""How the host computes with quantised weights: restored in each forward, bit for bit; or packed."""

GROUPS = (32, 64, 128, 256)
"""Elements that may share a scale in the kernel for 4 bits."""

ROWS, COLUMNS = 16, 32
"""Rows of which the kernel for 4 bits takes multiples, and columns of which that for 8 bits does. The latter does not
check them, reads beyond the end of rows of other lengths, and loads vectors from addresses that must be aligned."""

DTYPE = torch.bfloat16
"""Dtype of inputs. For float32 and float16 the kernels have no vector code, and are slower than restoring."""

MOST_INPUTS = {4: 64, 8: 16}
"""Rows of inputs, by bits, up to which the kernels are about as fast as restoring the weight, or faster: see `python -m
benchmarks host-kernels --rows 64`."""

LONG, MOST_JOINED = 4096, 4
"""Elements from which the kernel for 8 bits reads rows about as fast as longer ones (see `python -m benchmarks
host-kernels --width 2048`), and rows of inputs that it computes at once."""

BLOCK = 64
"""Rows that its layout keeps together at most: parts of so many rows may be packed one after another."""

CHUNK = 2**18
"""Elements that are packed at once: its integers of 32 bits stay in the processor's caches, and leave few gaps in
memory between packed weights."""


@dataclass(frozen=True)
class HostKernel:
    """The kernel for weights of one shape and kind.

    Attributes:
        bits: bits of an integer, 4 or 8.
        group: consecutive elements of a row that share a scale.
        shape: of the weight, (out, in).
    """

    bits: int
    group: int
    shape: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of its speed in the profile of a machine."""
        return f"int{self.bits}"

    @property
    def integers_shape(self) -> tuple[int, int]:
        """Shape of the integers as it takes them."""
        return self.shape[0], self.shape[1] * self.bits // 8

    @property
    def integers_dtype(self) -> torch.dtype:
        """Dtype of the integers as it takes them: two of 4 bits in a byte."""
        return torch.uint8 if self.bits == 4 else torch.int8

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales as it takes them: of 4 bits each beside a zero point."""
        return (self.shape[1] // self.group, self.shape[0], 2) if self.bits == 4 else (self.shape[0],)

    @property
    def most_inputs(self) -> int:
        """Rows of inputs up to which it is faster than restoring the weight."""
        return MOST_INPUTS[self.bits]

    def joined(self, inputs: int) -> int:
        """Return how many rows of 8 bits are read as one for a product with so many rows of inputs: 1, 2 or 4."""
        rows = 1
        while rows * self.shape[1] < LONG and 2 * rows * inputs <= MOST_JOINED and self.shape[0] % (2 * rows) == 0:
            rows *= 2
        return rows

    @property
    def copied(self) -> tuple[str, ...]:
        """Leaves of the stored tensors that are not read any more once the weight is packed, as it has copies of them.
        Of 8 bits there are none, unless a file does not align them."""
        return ("weight_packed", "weight_scale") if self.bits == 4 else ()

    def kept_bytes(self, leaf: str, stored: torch.Tensor) -> int:
        """Return the bytes that are kept in memory for a stored tensor once the weight is packed, by its leaf."""
        if leaf == "weight_scale":
            if self.bits == 4:
                return 2 * stored.numel() * DTYPE.itemsize  # each beside a zero point
            return stored.nbytes + (0 if stored.dtype == DTYPE else stored.numel() * DTYPE.itemsize)
        return self.shape[0] * self.shape[1] // 2 if leaf == "weight_packed" else stored.nbytes

    def takes(self, input: torch.Tensor) -> bool:
        """Return whether it is the fastest way to compute a product with `input`."""
        few = 0 < input.numel() <= self.most_inputs * input.shape[-1]
        return few and input.device.type == HOST and input.dtype == DTYPE

    def pack(self, format: WeightFormat, tensors: Tensors) -> PackedWeight:
        """Return the weight as it computes with it. The stored tensors are read in parts."""
        scales = format.scales(tensors).to(DTYPE)
        if self.bits == 8:
            return PackedWeight(
                self, _aligned(format.integers(tensors, self.shape, 0, self.shape[0])), scales.flatten()
            )
        pack: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        packed = torch.empty(self.integers_shape, dtype=self.integers_dtype)
        step = max(CHUNK // self.shape[1] // BLOCK, 1) * BLOCK
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            codes = format.integers(tensors, self.shape, start, stop).to(torch.int32).add_(8)
            packed[start:stop] = pack(codes, 1)
        both = torch.zeros(self.scales_shape, dtype=DTYPE)
        both[..., 0] = scales.t()
        return PackedWeight(self, packed, both)


def kernel_of(format: WeightFormat, shape: tuple[int, int], leaves: Iterable[str], dtype: torch.dtype) -> HostKernel:
    """Return the kernel for a weight.

    Args:
        format: how it is stored.
        shape: (out, in).
        leaves: its stored tensors.
        dtype: dtype that it would be restored to, which is that of its inputs.

    Raises:
        ValueError: there is none; the message is a clause about the weight.
    """
    leaves = frozenset(leaves)
    found = format.signed_integers(shape, leaves)
    taken = {*((4, group) for group in GROUPS), (8, shape[1])}
    if found is None or (found.bits, found.group) not in taken or ("weight_packed" in leaves) != (found.bits == 4):
        groups = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"it is stored as {format.label}, and the host's kernels take int4 in groups of {groups} and int8 with a "
            "scale for each row, without zero points"
        )
    if found.bits == 4 and shape[0] % ROWS:
        raise ValueError(f"it has {shape[0]} rows, and the host's kernel for int4 takes multiples of {ROWS}")
    if found.bits == 8 and shape[1] % COLUMNS:
        raise ValueError(
            f"its rows have {shape[1]} elements, and the host's kernel for int8 takes multiples of {COLUMNS}"
        )
    if dtype != DTYPE:
        raise ValueError(f"the model computes in {_name(dtype)}, and the host's kernels are fast in bfloat16 only")
    return HostKernel(found.bits, found.group, shape)


_COPIED = ("weight", "weight_packed", "weight_scale")
"""Names of the tensors that a weight is made of."""


class HostProduct(Protocol):
    """A product on the host, which a `QuantizedLinear` computes instead of restoring its weight."""

    def takes(self, input: torch.Tensor, parameters: Mapping[str, torch.Tensor | None]) -> bool:
        """Return whether the product with `input` may be computed so; `parameters` are the layer's present ones."""
        ...

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        ...


class PackedWeight:
    """A weight as its kernel takes it.

    Attributes:
        kernel: the kernel.
        integers: in its layout.
        scales: in `DTYPE`.
    """

    def __init__(self, kernel: HostKernel, integers: torch.Tensor, scales: torch.Tensor) -> None:
        self.kernel, self.integers, self.scales = kernel, integers, scales
        self._source: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}

    def of(self, parameters: Mapping[str, torch.Tensor]) -> PackedWeight:
        """Note the stored tensors that it was made of, by their names in the layer: once one is replaced or written to,
        it is not used any more."""
        self._source = {name: (tensor, _version(tensor)) for name, tensor in parameters.items()}
        return self

    @property
    def displaced(self) -> list[torch.Tensor]:
        """Stored tensors that are not read any more, as it computes with copies of them."""
        kept = {self.integers.data_ptr(), self.scales.data_ptr()}
        made_of = [tensor for name, (tensor, _) in self._source.items() if name in _COPIED]
        return [tensor for tensor in made_of if tensor.data_ptr() not in kept]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None  # copies of a layer have other stored tensors, and restore them

    def takes(self, input: torch.Tensor, parameters: Mapping[str, torch.Tensor | None]) -> bool:
        if not self.kernel.takes(input):
            return False
        source = self._source.items()
        return all(parameters[name] is tensor and _version(tensor) == version for name, (tensor, version) in source)

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, kernel = _aligned(input.reshape(-1, input.shape[-1]).contiguous()), self.kernel
        aten: Any = torch.ops.aten
        output: torch.Tensor
        if kernel.bits == 8 and (joined := kernel.joined(len(rows))) > 1:
            output = self._product_of_joined(rows, joined)
        elif kernel.bits == 8:
            output = aten._weight_int8pack_mm(rows, self.integers, self.scales)
        else:
            output = aten._weight_int4pack_mm_for_cpu(rows, self.integers, kernel.group, self.scales)
        if bias is not None:
            output += bias
        return output.view(*input.shape[:-1], kernel.shape[0])

    def _product_of_joined(self, rows: torch.Tensor, joined: int) -> torch.Tensor:
        """Return the product with so many rows of the weight read as one: (inputs, out).

        Such a row has no one scale, so that sums are scaled afterwards, and rounded twice.
        """
        (count, width), height = rows.shape, len(self.integers) // joined
        apart = rows.new_zeros(count, joined, joined, width)
        apart.diagonal(dim1=1, dim2=2).copy_(rows.unsqueeze(-1))
        multiply: Any = torch.ops.aten._weight_int8pack_mm
        sums = multiply(apart.view(-1, joined * width), self.integers.view(height, -1), rows.new_ones(height))
        output = rows.new_empty(count, height, joined)
        torch.mul(sums.view(count, joined, height).mT, self.scales.view(height, joined), out=output)
        return output.view(count, -1)


class PlannedProduct:
    """Stands for a `PackedWeight` in dry runs: nothing is packed, and nothing is computed."""

    def __init__(self, kernel: HostKernel) -> None:
        self._kernel = kernel

    def takes(self, input: torch.Tensor, parameters: Mapping[str, torch.Tensor | None]) -> bool:
        return self._kernel.takes(input)

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = PRODUCT(input, self._kernel.shape[0], self._kernel.name)
        return output if bias is None else output.add_(bias)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, or a copy if it does not begin where vectors can be loaded."""
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what differs once a tensor has other values."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
