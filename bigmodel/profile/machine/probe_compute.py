"""Measures the compute speed of a device: products, attention, convolutions, moves of bytes, and expert routing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ...devices import HOST
from ...quantized.host_kernels import COLUMNS, DTYPE, GROUPS, MOST_INPUTS, ROWS, HostKernel, PackedWeight
from ..trace.work import ATTENTION, CONVOLUTION, MOVE, POINTWISE, PRODUCT, ROUTE
from .calibrate import calibrated, works_of
from .machine import CACHED, Curve, DeviceSpeed
from .timing import Effort, is_asynchronous, seconds_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def probe_device(device: torch.device, effort: Effort, dtypes: Sequence[torch.dtype] = DTYPES) -> DeviceSpeed:
    """Measure the compute speed of `device`; dtypes that it does not support are left out."""
    curves: dict[str, Curve] = {}
    with torch.inference_mode():
        curves[MOVE] = _moves(device, effort)
        for dtype in dtypes:
            if not computes_in(dtype, device):
                continue
            name = str(dtype).removeprefix("torch.")
            curves[f"{PRODUCT}:{name}"] = _products(device, dtype, effort, effort.spread)
            curves[f"{PRODUCT}:{name}{CACHED}"] = _products(device, dtype, effort, 0)
            curves[f"{ATTENTION}:{name}"] = _attention(device, dtype, effort)
            curves[f"{CONVOLUTION}:{name}"], curves[f"{POINTWISE}:{name}"] = _convolutions(device, dtype, effort)
        if device.type == HOST:
            for bits in MOST_INPUTS:
                curves[f"{PRODUCT}:int{bits}"] = _packed_products(bits, effort)
    return with_routing(calibrated(curves, device, effort), device, effort)


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies, attends and convolves in a dtype.

    Raises:
        torch.OutOfMemoryError: the device has no memory left for the test.
    """
    tiny = _filled((1, 1, 8, 8), dtype, device)
    try:
        functional.linear(tiny, tiny[0, 0])
        functional.scaled_dot_product_attention(tiny, tiny, tiny)
        functional.conv2d(tiny, tiny)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _products(device: torch.device, dtype: torch.dtype, effort: Effort, spread: int) -> Curve:
    """Return rows -> seconds per element of the matrix. `spread`: bytes of matrices that are used in turn."""
    width = effort.width if spread else max(effort.width // 2, 16)
    count = max(1, spread // (width * width * dtype.itemsize))
    turn = itertools.cycle([_filled((width, width), dtype, device) for _ in range(count)])
    tiny = _filled((1, 1), dtype, device)

    def multiply(left: torch.Tensor, matrices: Iterator[torch.Tensor]) -> torch.Tensor:
        return functional.linear(left, next(matrices))

    def timed(left: torch.Tensor, matrices: Iterator[torch.Tensor]) -> float:
        return _timed(partial(multiply, left, matrices), device, effort)

    least = timed(tiny, itertools.repeat(tiny))
    values = [_beyond(least, timed(_filled((rows, width), dtype, device), turn), device) for rows in effort.rows]
    return Curve(tuple(map(float, effort.rows)), tuple(value / width**2 for value in values), grows=True)


def _packed_products(bits: int, effort: Effort) -> Curve:
    """Return rows -> seconds per element of packed weights, up to the rows that their kernel is used for."""
    width, device = effort.width, torch.device(HOST)

    def packed(rows: int, columns: int) -> PackedWeight:
        kernel = HostKernel(bits, min(GROUPS) if bits == 4 else columns, (rows, columns))
        integers = torch.ones(kernel.integers_shape, dtype=kernel.integers_dtype)
        return PackedWeight(kernel, integers, _filled(kernel.scales_shape, DTYPE, device))

    def timed(rows: int, weights: Iterator[PackedWeight], columns: int) -> float:
        inputs = _filled((rows, columns), DTYPE, device)
        return _timed(lambda: next(weights).product(inputs, None), device, effort)

    turn = itertools.cycle([packed(width, width) for _ in range(max(1, 8 * effort.spread // (bits * width**2)))])
    least = timed(1, itertools.repeat(packed(ROWS, COLUMNS)), COLUMNS)
    sizes = [rows for rows in effort.rows if rows <= MOST_INPUTS[bits]]
    values = [_beyond(least, timed(rows, turn, width), device) / width**2 for rows in sizes]
    return Curve(tuple(map(float, sizes)), tuple(values), grows=True)


def _attention(device: torch.device, dtype: torch.dtype, effort: Effort) -> Curve:
    """Return rows of queries -> seconds per element of keys and values."""
    heads, width, length = 8, 64, max(effort.rows)

    def timed(rows: int, length: int) -> float:
        query, key, value = (_filled((1, heads, count, width), dtype, device) for count in (rows, length, length))
        return _timed(partial(functional.scaled_dot_product_attention, query, key, value), device, effort)

    least = timed(1, 1)
    numbers = 2 * heads * length * width
    values = tuple(_beyond(least, timed(rows, length), device) / numbers for rows in effort.rows)
    return Curve(tuple(map(float, effort.rows)), values, grows=True)


def _convolutions(device: torch.device, dtype: torch.dtype, effort: Effort) -> tuple[Curve, Curve]:
    """Return positions -> seconds per weight, for the 3x3 and for the 1x1 convolutions of a residual block."""

    def timed(side: int, channels: int) -> tuple[float, float]:
        image, inner = (_filled((1, count, side, side), dtype, device) for count in (4 * channels, channels))
        narrow = _filled((channels, 4 * channels, 1, 1), dtype, device)
        wide = _filled((4 * channels, channels, 1, 1), dtype, device)
        middle = _filled((channels, channels, 3, 3), dtype, device)

        def ends() -> torch.Tensor:
            return functional.conv2d(functional.conv2d(image, narrow), wide)

        spanning = _timed(partial(functional.conv2d, inner, middle, padding=1), device, effort) / middle.numel()
        return spanning, _timed(ends, device, effort) / (narrow.numel() + wide.numel())

    sizes = tuple(float(side**2) for side, _ in effort.images)
    spanning, pointwise = zip(*(timed(side, channels) for side, channels in effort.images), strict=True)
    return Curve(sizes, spanning, grows=True), Curve(sizes, pointwise, grows=True)


def _moves(device: torch.device, effort: Effort) -> Curve:
    """Return bytes read and written -> seconds per byte, for an addition whose result is newly allocated."""

    def timed(count: int) -> float:
        left, right = (_filled((count,), torch.float32, device) for _ in range(2))
        return _timed(partial(torch.add, left, right), device, effort)

    least = timed(1)
    values = tuple(_beyond(least, timed(nbytes // 4), device) / (3 * nbytes) for nbytes in effort.moved)
    return Curve(tuple(3.0 * nbytes for nbytes in effort.moved), values)


def _beyond(least: float, taken: float, device: torch.device) -> float:
    """Return the seconds of an operation without the call overhead, which is counted separately.

    Args:
        least: seconds of an operation that does next to nothing.
        taken: seconds of the operation, one of many in a row.
        device: where it runs. On an asynchronous one, calls overlap with the work of earlier ones: each takes the
            longer of the two, so nothing is subtracted. Of work that is shorter than a call, only that is known.
    """
    return taken if is_asynchronous(device) else max(taken - least, 0.02 * taken)


def _timed(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    return seconds_of(work, device, effort.at_least, effort.repeats)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor whose pages are all written; untouched zero pages share one physical page."""
    return torch.full(shape, 0.5, dtype=dtype).to(device)


LAYERS = 4
"""Layers of the mixture of experts that routing is measured with."""


def with_routing(speed: DeviceSpeed, device: torch.device, effort: Effort) -> DeviceSpeed:
    """Return `speed` with the seconds that one routing to experts takes beyond its operations.

    Sorting tokens by expert takes many operations on few bytes, which are slower than most. They are measured together,
    in a mixture of experts so small that it does little else.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 128, "num_attention_heads": 2}
    experts: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=LAYERS, **sizes, **experts)).eval()
    _, step = works_of(model, 1, effort.prompt + 1, device)
    seconds = _seconds_of_step(model, device, effort)
    beyond = max(seconds - speed.total(step, cached=True), 0.01 * seconds) / LAYERS
    return replace(speed, curves={**speed.curves, ROUTE: Curve((1.0,), (beyond,))})


def _seconds_of_step(model: Any, device: torch.device, effort: Effort) -> float:
    model.to(device)
    ids = torch.zeros(1, effort.prompt, dtype=torch.long, device=device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        return seconds_of(
            lambda: model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True),
            device,
            2 * effort.at_least,
            2 * effort.repeats - 1,
        )
