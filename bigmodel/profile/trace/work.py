"""The work of one operation, by kinds that differ in speed, and its scaling to fewer tokens.

A product multiplies `rows` rows with a matrix of `elements` elements: with few rows it takes as long as reading the
matrix, with many as long as multiplying. Fused attention is two products whose matrices are keys and values. The rows
of a convolution are positions; kernels that span several positions are faster (Winograd). All other operations that
return a new tensor move bytes. Operations that return none, or a view, cost only their call.

`scratch_bytes` is the workspace of an operation's kernel by ATen's sources, checked against measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ...devices import HOST, virtual
from ...quantized.formats.restoring import PRODUCT as PACKED_PRODUCT
from ...quantized.formats.restoring import RESTORE
from ..model.experts import RouterChoice

aten = torch.ops.aten

PRODUCT, CONVOLUTION, ATTENTION, MOVE, CALL = "product", "convolution", "attention", "move", "call"
POINTWISE, ROUTE = "pointwise", "route"

_LEAVES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Types of arguments that hold no tensors: most arguments are of them."""


@dataclass(frozen=True)
class Work:
    """One operation.

    Attributes:
        kind: "product", "attention", "convolution", "pointwise" (a convolution that spans one position), "move",
            "call" (a view, or another operation without a new storage), or "route": the sorting of tokens by expert,
            which takes longer than the moves it consists of.
        dtype: dtype that it computes in, as in "float32"; of products with packed weights their kernel, as "int4".
        elements: elements of the matrices that it multiplies with.
        rows: rows that it multiplies with them.
        nbytes: bytes that it reads and writes.
    """

    kind: str
    dtype: str = "float32"
    elements: int = 0
    rows: float = 1
    nbytes: int = 0


CALL_ONLY = Work(CALL)
"""The work of a view, or of another operation without a new storage."""


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or the results of an operation, which are nested in sequences at most.

    PyTorch's own walk over nested structures would take a tenth of a dry run.
    """
    found: list[torch.Tensor] = []
    _add_tensors(found, values)
    return found


def _add_tensors(found: list[torch.Tensor], values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind in _LEAVES:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif kind is tuple or kind is list or isinstance(value, (list, tuple)):
            _add_tensors(found, value)
        elif kind is dict or isinstance(value, Mapping):
            _add_tensors(found, value.values())


def work_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
    choice: RouterChoice | None = None,
    read: list[torch.Tensor] | None = None,
) -> Work | None:
    """Return the work of an operation on (fake) tensors; None if it costs nothing.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: its result.
        choice: the router's choice, if the operation belongs to a mixture's experts.
        read: the tensors among its arguments, in order; None: they are looked for.
    """
    if func.namespace == "prim":
        return None
    if func is aten._grouped_mm.default:
        return _grouped(choice, *args, **kwargs)
    known = _KINDS.get(func)
    if known is not None:
        return known(*args, **kwargs)
    made = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
    if func.is_view or not made or func in _VIEWS:
        return CALL_ONLY
    if func in _LOOKUPS:
        return Work(MOVE, _dtype(made[0]), nbytes=2 * sum(map(_nbytes, made)))
    read = tensors_in(args, kwargs) if read is None else read
    return Work(MOVE, _dtype(made[0]), nbytes=sum(map(_nbytes, [*read, *made])))


def _mm(left: torch.Tensor, right: torch.Tensor, **_: Any) -> Work:
    return Work(PRODUCT, _dtype(right), right.numel(), left.shape[0], _nbytes(left) + _nbytes(right))


def _addmm(_bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any) -> Work:
    return _mm(left, right)


def _bmm(left: torch.Tensor, right: torch.Tensor, **_: Any) -> Work:
    """The larger side counts as the matrix, the other as the rows it is multiplied with."""
    matrix, rows = (right, left.shape[1]) if right.numel() >= left.numel() else (left, right.shape[2])
    return Work(PRODUCT, _dtype(matrix), matrix.numel(), rows, _nbytes(left) + _nbytes(right))


def _baddbmm(_bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any) -> Work:
    return _bmm(left, right)


def _linear(left: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Work:
    rows = left.numel() // max(left.shape[-1], 1)
    return Work(PRODUCT, _dtype(weight), weight.numel(), rows, _nbytes(left) + _nbytes(weight))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any) -> Work:
    causal = kwargs.get("is_causal", any(flag is True for flag in rest)) and query.shape[-2] > 1
    groups = query.shape[1] // max(key.shape[1], 1)
    elements = groups * (key.numel() + value.numel())
    nbytes = _nbytes(query) + _nbytes(key) + _nbytes(value)
    return Work(ATTENTION, _dtype(key), elements // 2 if causal else elements, query.shape[-2], nbytes)


def _grouped(choice: RouterChoice | None, tokens: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> Work:
    if weights.dim() != 3:
        return _mm(tokens, weights)
    rows, count = tokens.shape[0], weights.shape[0]
    wanted = max((choice or RouterChoice(rows, 1, count)).wanted, 1.0)
    elements = int(wanted * weights[0].numel())
    nbytes = _nbytes(tokens) + elements * weights.element_size()
    return Work(PRODUCT, _dtype(weights), elements, max(1.0, rows / wanted), nbytes)


def _convolve(data: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> Work:
    stride = rest[1] if len(rest) > 1 else [1]
    steps = [stride[min(i, len(stride) - 1)] for i in range(data.dim() - 2)]
    positions = math.prod(max(1, size // step) for size, step in zip(data.shape[2:], steps, strict=True))
    nbytes = _nbytes(data) + _nbytes(weight)
    kind = POINTWISE if weight.shape[2:].numel() == 1 else CONVOLUTION
    return Work(kind, _dtype(weight), weight.numel(), data.shape[0] * positions, nbytes)


def _restore(out: torch.Tensor, _stored: Any, moved: int) -> Work:
    return Work(MOVE, _dtype(out), nbytes=moved)


def _packed(input: torch.Tensor, rows: int, kernel: str) -> Work:
    """The dtype is the kernel's, `"int4"` or `"int8"`, whose speeds are measured."""
    elements = input.shape[-1] * rows
    return Work(PRODUCT, kernel, elements, input.numel() // max(input.shape[-1], 1), _nbytes(input) + elements)


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_KINDS: dict[Any, Callable[..., Work]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.linear.default: _linear,
    aten.convolution.default: _convolve,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attend,
    aten._scaled_dot_product_flash_attention.default: _attend,
    aten._scaled_dot_product_efficient_attention.default: _attend,
    aten._scaled_dot_product_cudnn_attention.default: _attend,
    RESTORE: _restore,
    PACKED_PRODUCT: _packed,
}

_VIEWS = {aten._unsafe_view.default, aten.lift_fresh.default, aten.empty.memory_format, aten.empty_like.default}
_LOOKUPS = {aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default}


def scale_work(work: Work, share: float) -> Work:
    """Return the work of the same operation on `share` of the tokens: the same matrices with fewer rows; of attention
    also fewer keys and values."""
    rows, elements, nbytes = (max(1, round(number * share)) for number in (work.rows, work.elements, work.nbytes))
    if work.kind == MOVE:
        return replace(work, nbytes=nbytes)
    if work.kind == ATTENTION:
        return replace(work, rows=rows, elements=elements, nbytes=nbytes)
    return replace(work, rows=rows) if work.kind in (PRODUCT, CONVOLUTION, POINTWISE) else work


KEY_BLOCK = 512
"""Keys of a block in ATen's flash attention for the CPU."""

FEWEST_IN_BLOCKS = 16
"""Channels that oneDNN blocks together with AVX-512; inputs of fewer channels are not reordered."""


def scratch_bytes(func: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the peak bytes of workspace that the kernel of `func` takes beside inputs and outputs.

    Args:
        func: the operation.
        args: its arguments: (fake) tensors on the device it will run on.
        output: its result.
    """
    known = _KNOWN.get(func)
    return 0 if known is None else known(args, output)


def _flash_attention(args: tuple[Any, ...], _output: Any) -> int:
    """Each thread holds in float32 the scores of a block of queries with a block of keys, their maxima and sums, and
    the block's output; for narrower dtypes also the scores in that dtype (ATen's FlashAttentionKernel.cpp)."""
    query, key = args[:2]
    rows, width, keys = query.shape[-2], query.shape[-1], key.shape[-2]
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    keys = min(keys, KEY_BLOCK)
    numbers = block * (keys + 2 + width)
    narrow = block * keys * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (4 * numbers + narrow)


def _safe_softmax(args: tuple[Any, ...], _output: Any) -> int:
    """A mask of the scores that are minus infinity, one byte each (ATen's SoftMax.cpp). A virtual accelerator computes
    on the host, so the mask lies there."""
    scores: torch.Tensor = args[0]
    return 0 if scores.device.type == virtual.TYPE else scores.numel()


def _convolution(args: tuple[Any, ...], output: torch.Tensor) -> int:
    """On the host oneDNN reorders inputs and weights into blocked layouts, and the output back once these are freed.
    Pointwise float32 convolutions with stride 1 read them as they are."""
    data, weight, _bias, stride, _padding, _dilation, transposed = args[:7]
    if data.device.type != HOST or transposed or not torch.backends.mkldnn.is_available():
        return 0
    if weight.shape[2:].numel() == 1 and set(stride) == {1} and data.dtype == torch.float32:
        return 0
    copied = data.nbytes if data.shape[1] >= FEWEST_IN_BLOCKS and data.is_contiguous() else 0
    return max(copied + weight.nbytes, output.nbytes)


_KNOWN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten._safe_softmax.default: _safe_softmax,
    aten.convolution.default: _convolution,
}
