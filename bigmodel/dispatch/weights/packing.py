"""Quantisation of one weight to integers in one packed buffer, and back.

torchao chooses scales and rounds: symmetric for ``int8``, with a zero point for ``int4``. The inverse,
``(integer - zero point) * scale``, is implemented here, because it must write into existing memory and allocate almost
none: it runs on the device, on a copy stream, while another block computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import DispatchError
from ...profile.model.quantized import GROUP, UNPACK_GROUPS, quantized_parts, scratch_bytes
from .layout import Layout
from .outside_use import host_value

PACK_GROUPS = 4 * 2**10
"""Groups that are quantised at once: few enough to fit a core's cache."""

_HALF = GROUP // 2


@dataclass(frozen=True)
class WeightError:
    """The error of a quantised weight.

    Attributes:
        relative: Euclidean norm of the difference over that of the weight.
        largest: Largest difference of any element.
    """

    relative: float
    largest: float


@dataclass(frozen=True)
class Packing:
    """The quantised form of one weight, of `layout.nbytes` bytes.

    Attributes:
        offload_dtype: ``"int8"`` or ``"int4"``.
        groups: Number of groups of `GROUP` elements.
        layout: Places of scales, zero points and integers.
    """

    offload_dtype: str
    groups: int
    layout: Layout

    @classmethod
    def of(cls, weight: torch.Tensor, offload_dtype: str) -> Packing | None:
        """Return the packing of `weight`; None for a tensor that quantising would not make smaller."""
        parts = quantized_parts(tuple(weight.shape), weight.dtype, offload_dtype)
        if parts is None:
            return None
        layout = Layout.of((dtype, torch.Size(shape)) for dtype, shape in parts)
        return cls(offload_dtype, parts[0][1][0], layout)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that `unpack` needs."""
        return scratch_bytes(self.groups, self.offload_dtype)

    def pack(self, weight: torch.Tensor, packed: torch.Tensor, name: str = "weight") -> WeightError:
        """Quantise `weight` into `packed`, a uint8 tensor of `layout.nbytes` on the host.

        Raises:
            DispatchError: It holds an infinity or a NaN, which would affect a whole group; the message contains `name`.
        """
        groups = host_value(weight).reshape(-1, GROUP)
        scales, *zeros, integers = self.layout.views(packed)
        error, norm, largest = 0.0, 0.0, 0.0
        for some in self._steps(PACK_GROUPS):
            exact = groups[some].float()
            scale, zero, rounded = self._round(exact)
            scales[some] = scale[:, None]
            if zeros:
                zeros[0][some] = zero[:, None]
                integers[some] = rounded[:, :_HALF] | rounded[:, _HALF:] << 4
            else:
                integers[some] = rounded
            restored = ((rounded.float() - zero[:, None]) * scale[:, None]).to(weight.dtype).float()
            difference = restored - exact
            furthest = float(torch.linalg.vector_norm(difference, math.inf))
            if not math.isfinite(furthest):
                raise DispatchError(
                    f"{name} holds a value (infinite, NaN, or near the end of its dtype's range) that "
                    f"{self.offload_dtype} cannot represent; leave out offload_dtype, or repair the weight"
                )
            error = math.hypot(error, float(torch.linalg.vector_norm(difference, dtype=torch.float64)))
            norm = math.hypot(norm, float(torch.linalg.vector_norm(exact, dtype=torch.float64)))
            largest = max(largest, furthest)
        return WeightError(error / norm if norm else 0.0, largest)

    def groups_within(self, nbytes: int) -> int:
        """Return the number of groups that the first `nbytes` of the packed weight contain completely."""
        integers = self.layout.places[-1]
        return min(max((nbytes - integers.offset) * self.groups // integers.nbytes, 0), self.groups)

    def unpack(
        self, packed: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor, first: int = 0, end: int | None = None
    ) -> None:
        """Restore `packed` into `weight`, on the device of both.

        Args:
            packed: uint8, written by `pack`.
            weight: Contiguous, of any floating-point dtype.
            scratch: uint8 of at least `scratch_bytes`; overwritten.
            first: First group to write.
            end: End of the groups to write, exclusive; None: all.
        """
        groups = weight.view(-1, GROUP)
        scales, *zeros, integers = self.layout.views(packed)
        for some in self._steps(UNPACK_GROUPS, first, end):
            if not zeros:
                torch.mul(integers[some], scales[some], out=groups[some])
                continue
            halves, zero = integers[some], zeros[0][some]
            integer = scratch[: halves.numel()].view(halves.shape)
            centred = integer.view(torch.int8)
            torch.bitwise_and(halves, 15, out=integer)
            torch.mul(centred.sub_(zero), scales[some], out=groups[some][:, :_HALF])
            torch.bitwise_right_shift(halves, 4, out=integer)
            torch.mul(centred.sub_(zero), scales[some], out=groups[some][:, _HALF:])

    def _steps(self, size: int, first: int = 0, end: int | None = None) -> Iterator[slice]:
        end = self.groups if end is None else end
        for begin in range(first, end, size):
            yield slice(begin, min(begin + size, end))

    def _round(self, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scale, zero point and integers of float32 groups; one integer per byte, also for ``int4``."""
        ao = torchao_primitives()
        if self.offload_dtype == "int4":
            kind, dtype, low, high = ao.MappingType.ASYMMETRIC, torch.uint8, 0, 15
        else:
            kind, dtype, low, high = ao.MappingType.SYMMETRIC, torch.int8, -128, 127
        block = (1, GROUP)
        # torchao's default minimum of scales would be too coarse for very small weights.
        tiny = torch.finfo(torch.float32).tiny
        scale, zero = ao.choose_qparams_affine(exact, kind, block, dtype, low, high, tiny, torch.float32, torch.int8)
        return scale, zero, ao.quantize_affine(exact, block, scale, zero, dtype, low, high)


def torchao_primitives() -> Any:
    """Return torchao's module of quantisation primitives.

    Raises:
        DispatchError: torchao is not installed.
    """
    try:
        from torchao.quantization import quant_primitives
    except ImportError as error:
        raise DispatchError(
            f"offload_dtype= needs torchao, which cannot be imported here ({error}); pip install torchao"
        ) from error
    return quant_primitives
