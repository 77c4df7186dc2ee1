"""Formats of quantised weights: the storage of one weight, and the reading of a checkpoint's config.

A `WeightFormat` describes one weight, a matrix (out, in), and restores it from its stored tensors. A `Scheme` describes
a checkpoint: it is read from ``quantization_config`` and says which keys belong to one weight, and in which format.

Tensors of one weight are called by their *leaf*: the key without the module's name, as in ``weight_scale_inv``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...devices import HOST
from ...errors import CheckpointFormatError
from ...sources.headers import TensorEntry
from .restoring import record_restoring

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors of one weight by leaf."""

Read = Callable[[TensorEntry], torch.Tensor]
"""Returns a tensor of the checkpoint."""

CHUNK = 2**22
"""Elements of a weight that are restored at once on an accelerator. It bounds the memory of intermediate results."""

HOST_CHUNK = 2**18
"""As `CHUNK`, on the host: intermediate results, of up to 4 bytes an element, stay in a core's own caches."""


@dataclass(frozen=True)
class Stored:
    """One stored tensor of a weight.

    Attributes:
        shape: its shape; None: any, of one element.
        dtypes: dtypes that it may have.
        optional: whether it may be missing.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


@dataclass(frozen=True)
class SignedIntegers:
    """A weight of signed integers, each times the scale of its group, without zero points.

    Attributes:
        bits: bits of an integer.
        group: consecutive elements of a row that share a scale.
    """

    bits: int
    group: int


class WeightFormat(ABC):
    """How one matrix is stored. Instances are values: equal if they describe the same."""

    checked: ClassVar[tuple[str, ...]] = ()
    """Leaves whose values are checked before a model is loaded: small ones, such as scales."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name with what distinguishes it, such as ``"int4, groups of 32"``."""

    @abstractmethod
    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        """Return the stored tensors, by leaf, of a weight of `shape` (out, in).

        Raises:
            ValueError: no weight of that shape can be stored so; the message is a clause about the shape.
        """

    @abstractmethod
    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows from `start` to `stop`, multiples of `step` or the end, of the weight of `shape`, in `dtype`
        or a dtype that is cast to it."""

    def step(self, shape: tuple[int, int]) -> int:
        """Return the number of rows of which only multiples can be restored."""
        return 1

    def restore_into(self, out: torch.Tensor, tensors: Tensors) -> None:
        """Restore a weight into `out`, (out, in), of any strides."""
        shape = (int(out.shape[0]), int(out.shape[1]))
        chunk = self._rows_at_once(shape, out.device)
        if isinstance(out, FakeTensor):  # a dry run
            record_restoring(self, out, tensors, min(chunk, shape[0]))
            return
        for start in range(0, shape[0], chunk):
            stop = min(start + chunk, shape[0])
            out[start:stop] = self.rows(tensors, shape, start, stop, out.dtype)

    def _rows_at_once(self, shape: tuple[int, int], device: torch.device) -> int:
        step, elements = self.step(shape), HOST_CHUNK if device.type == HOST else CHUNK
        return max(1, elements // max(shape[1], 1) // step) * step

    def restore(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of `shape` in `dtype`, on the device of its stored tensors.

        Its bits are those of the dequantised weight by the format's own library, cast to `dtype`.
        """
        device = next(iter(tensors.values())).device
        out = torch.empty(shape, dtype=dtype, device=device)
        self.restore_into(out, tensors)
        return out

    def signed_integers(self, shape: tuple[int, int], leaves: Collection[str]) -> SignedIntegers | None:
        """Return what a weight of `shape` whose tensors have these leaves consists of, if it is scaled integers, which
        `integers` and `scales` return; else None."""
        return None

    def integers(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor:
        """Return the integers of the rows from `start` to `stop`: int8, (stop - start, in)."""
        raise NotImplementedError

    def scales(self, tensors: Tensors) -> torch.Tensor:
        """Return the scales, (out, groups)."""
        raise NotImplementedError

    def problem(self, shape: tuple[int, int], found: Mapping[str, TensorEntry]) -> str | None:
        """Return why the tensors `found` in a header, by leaf, are not a weight of `shape`; None if they are."""
        try:
            expected = self.stored(shape)
        except ValueError as error:
            return str(error)
        for leaf, stored in expected.items():
            entry = found.get(leaf)
            if entry is None:
                if not stored.optional:
                    return f"its {leaf} is missing"
                continue
            fits = len(entry.shape) < 2 and _count(entry) == 1 if stored.shape is None else entry.shape == stored.shape
            if not fits:
                return f"its {leaf} has the shape {_shown(entry.shape)}, not {_shown(stored.shape or (1,))}"
            if entry.dtype not in stored.dtypes:
                return f"its {leaf} is {_name(entry.dtype)}, not {' or '.join(map(_name, stored.dtypes))}"
        extra = sorted(set(found) - set(expected))
        return f"it has a tensor {extra[0]}, which the format does not know" if extra else None

    def broken(self, leaf: str, tensor: torch.Tensor) -> str | None:
        """Return what is wrong with the values of a checked tensor; None if nothing is."""
        for piece in tensor.flatten().split(CHUNK):
            values = piece.to(torch.float32) if piece.is_floating_point() else piece
            if not bool(torch.isfinite(values).all()):
                return f"its {leaf} has values that are not finite"
        return None


@dataclass(frozen=True)
class FusedPlace:
    """The place of a matrix in a tensor that a model has instead of it.

    Attributes:
        name: the model's name of the tensor, (experts, in, out).
        expert: index of its first dimension.
        part: rows of the parts of an expert follow each other in turns; the number of this one.
        parts: how many there are.
    """

    name: str
    expert: int
    part: int
    parts: int


class Scheme(ABC):
    """How the weights of one checkpoint are stored, by its ``quantization_config``."""

    method: str
    """Name of the format, for people."""
    leaves: frozenset[str]
    """Leaves that the tensors of a weight may have."""
    marks: frozenset[str]
    """Leaves that only weights stored in this format have."""

    def split(self, key: str) -> tuple[str, str]:
        """Return the name of the weight that the tensor `key` belongs to, as it is in unquantised checkpoints, and the
        tensor's leaf."""
        base, dot, leaf = key.rpartition(".")
        return f"{base}{dot}weight", leaf

    def place(self, name: str) -> FusedPlace | None:
        """Return the place of the weight `name` if it is part of a fused tensor of which transformers' own conversions
        do not know; else None."""
        return None

    @abstractmethod
    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        """Return the format of the weight `name`, given its tensors by leaf.

        Args:
            name: the weight's name in the checkpoint.
            found: its tensors in the header.
            read: reads small tensors that describe a weight. None: only headers are at hand, which give the bytes.

        Raises:
            ValueError: they are in none; the message is a clause about the weight.
        """


def refuse_config(reason: str) -> CheckpointFormatError:
    """Return the error about a ``quantization_config`` that cannot be read."""
    return CheckpointFormatError(f"quantization_config: {reason}")


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer of a config.

    Raises:
        CheckpointFormatError: it is none.
    """
    value = config.get(name, default)
    if type(value) is not int or value <= 0:
        raise refuse_config(f"{name} is {value!r:.60}, not a positive integer")
    return value


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of `size` hold `count`."""
    return -(-count // size)


def _count(entry: TensorEntry) -> int:
    return torch.Size(entry.shape).numel()


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
