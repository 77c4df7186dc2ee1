"""Attention of a whole packed step in one call per layer, on CUDA: PyTorch's variable-length attention.

Each attention call of the loop in :mod:`.attention` is a sequence of its own here, of the same shape: so the bits of a
row depend on its call alone, if the kernel computes sequences independently. Its documentation says so for one split;
:func:`batched_kernel` checks it on the device, and leaves the loop in its place where a bit differs. On the host the
loop stays: PyTorch has no such kernel there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from bigmodel.devices.pinned import on_device
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.reading import Attended, Reading

logger = logging.getLogger(__name__)

Attend = Callable[..., torch.Tensor]


class Kernel(Protocol):
    """Attention of several sequences in one call."""

    def __hash__(self) -> int: ...

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        longest: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention, aligned to the end of each sequence: [rows, heads, dim].

        Args:
            query: [rows, heads, dim] of all sequences.
            key: [positions, key-value heads, dim] of all sequences.
            value: Like ``key``.
            queries: int32 [sequences + 1], where the rows of each sequence begin; at most PROMPT_BLOCK each.
            keys: int32 [sequences + 1], where the positions of each sequence begin.
            longest: Most positions of a sequence.
            scale: Factor of the scores; None for ``dim ** -0.5``.
            window: Positions that a row attends to, its own included; None for all before it.
        """
        ...


def flash_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
    one_split: bool = True,
) -> torch.Tensor:
    """See :class:`Kernel`. The most rows are always given as PROMPT_BLOCK: the kernel must not choose by the batch.

    ``one_split`` asks not to split sequences, where this PyTorch can be asked; some of its kernels refuse, and some of
    these never split.
    """
    from torch.nn.attention.varlen import varlen_attn

    options = _options(one_split)
    left = -1 if window is None else window - 1
    out: Any = varlen_attn(
        query, key, value, queries, keys, PROMPT_BLOCK, longest, scale=scale, window_size=(left, 0), **options
    )
    attended: torch.Tensor = out
    return attended


@cache
def _options(one_split: bool) -> dict[str, Any]:
    """Options of `varlen_attn` that this PyTorch has: the oldest has none of them, and groups heads by itself."""
    from torch.nn.attention.varlen import varlen_attn

    wanted = {"enable_gqa": True, **({"num_splits": 1} if one_split else {})}
    known = inspect.signature(varlen_attn).parameters
    return {name: value for name, value in wanted.items() if name in known}


KERNELS: dict[str, tuple[Kernel, ...]] = {"cuda": (flash_varlen, partial(flash_varlen, one_split=False))}
"""Kernels by the type of device, the one to be preferred first."""

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256


def batched_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend) -> Kernel | None:
    """The kernel for tensors like these, [rows, heads, dim]; None where the loop must compute.

    Args:
        query: Queries of a step.
        key: Keys of a layer.
        value: Values of a layer.
        attend: The loop's attention of one sequence, with which the kernel is compared.
    """
    kernels = KERNELS.get(query.device.type, ())
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    narrow = query.dtype in _DTYPES and query.shape[-1] <= _WIDEST and query.shape[-1] % 8 == 0
    if not (same and (narrow or query.device.type != "cuda")):
        return None
    sizes = query.shape[1], key.shape[1], query.shape[2]
    checked = (kernel for kernel in kernels if is_checked(kernel, attend, query.device, query.dtype, *sizes))
    return next(checked, None)


CHECKED_SHAPES = ((PROMPT_BLOCK, PROMPT_BLOCK), (37, 165), (1, 1), (1, 2049), (1, PROMPT_BLOCK + 1))
"""Rows and positions of the sequences with which a kernel is checked."""


@cache
def is_checked(
    kernel: Kernel, attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, groups: int, dim: int
) -> bool:
    """Whether sequences get the same bits alone and together, and what the loop computes up to rounding."""
    try:
        with torch.inference_mode():
            right = _is_right(kernel, attend, partial(_normal, device, dtype), heads, groups, dim)
    except Exception as error:  # a kernel may refuse a device or a shape in any way
        logger.warning("attention goes sequence by sequence: %s: %s", type(error).__name__, error)
        return False
    if not right:
        logger.warning("attention goes sequence by sequence: in a batch its bits differ from those of one sequence")
    return right


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _is_right(kernel: Kernel, attend: Attend, normal: Attend, heads: int, groups: int, dim: int) -> bool:
    rows, positions = zip(*CHECKED_SHAPES, strict=True)
    query, key = normal(sum(rows), heads, dim), normal(sum(positions), groups, dim)
    value = key.flip(0).contiguous()
    together = _computed(kernel, query, key, value, rows, positions)
    tolerance = 1e-4 if query.dtype == torch.float32 else 0.05
    row = position = 0
    for count, length in CHECKED_SHAPES:
        own = query[row : row + count], key[position : position + length], value[position : position + length]
        part = together[row : row + count]
        if not torch.equal(_computed(kernel, *own, [count], [length]), part):
            return False
        q, k, v = (each.transpose(0, 1) for each in own)
        if (attend(q, k, v, offset=length - count).float() - part.float()).abs().max() > tolerance:
            return False
        row, position = row + count, position + length
    return True


def _computed(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Seq[int], positions: Seq[int]
) -> torch.Tensor:
    return kernel(
        query, key, value, _begins(rows, query.device), _begins(positions, query.device), max(positions), None, None
    )


def _begins(lengths: Seq[int], device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


@dataclass(frozen=True)
class PagedCalls:
    """Attention calls of a step, one after the other, whose keys and values are gathered together.

    Attributes:
        reading: Positions of the arena that are attended to, of one call after the other, on the host.
        gathered: The same on the device.
        lengths: How many these are, by call.
        rows: Rows of each call.
        queries: int32 [calls + 1], where the rows of each call begin.
        keys: int32 [calls + 1], where ``gathered`` of each call begins.
    """

    reading: Reading
    gathered: torch.Tensor
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, attended: Seq[Attended], rows: Seq[int], device: torch.device) -> PagedCalls:
        """Calls that have ``rows`` and attend to ``attended``."""
        lengths = tuple(len(each.positions) for each in attended)
        reading = Reading.of(attended)
        gathered = on_device(reading.rows, device)
        return cls(reading, gathered, lengths, tuple(rows), _begins(rows, device), _begins(lengths, device))


@dataclass(frozen=True)
class PagedStep:
    """Positions of a packed step's tokens in an arena, on one device, for layers of one window.

    Attributes:
        stored: Positions of the arena, of each token of the step, on the host.
        written: The same on the device.
        calls: All attention calls in order, as many together as may be gathered at once.
    """

    stored: torch.Tensor
    written: torch.Tensor
    calls: tuple[PagedCalls, ...]

    @cached_property
    def readings(self) -> list[Reading]:
        """What is gathered at once, in order."""
        return [calls.reading for calls in self.calls]

    @classmethod
    def of(
        cls, written: Seq[torch.Tensor], attended: Seq[Attended], rows: Seq[int], device: torch.device, most: int
    ) -> PagedStep:
        """The step that writes to ``written``, whose calls have ``rows`` and attend to ``attended``.

        At most ``most`` positions are gathered at once, or those of one call: each token of a text that is computed
        again is a call of its own, and attends to all before it.
        """
        calls = [
            PagedCalls.of(attended[part], rows[part], device)
            for part in parts_of_lengths([len(each.positions) for each in attended], most)
        ]
        stored = torch.cat(list(written))
        return cls(stored, on_device(stored, device), tuple(calls))


def parts_of_lengths(lengths: Seq[int], most: int) -> list[slice]:
    """Consecutive parts of ``lengths``, each as long as its sum allows, and not empty."""
    parts, begin, total = [], 0, 0
    for position, length in enumerate(lengths):
        if position > begin and total + length > most:
            parts.append(slice(begin, position))
            begin, total = position, 0
        total += length
    return [*parts, slice(begin, len(lengths))]
