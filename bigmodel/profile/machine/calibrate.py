"""Calibrates the measured speed of single operations by running whole models.

An operation that is measured by itself has its inputs, code and memory in caches; within a model it does not. So two
small transformers are run, one of many small matrices and one of few large ones. The difference between their times and
the sums of their operations is attributed to its possible causes: in a step of one token, the call overhead and the
reading of weights; in a prompt, multiplying and moving bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...devices import HOST
from ..trace.work import CONVOLUTION, MOVE, POINTWISE, PRODUCT, Work
from .machine import CACHED, Curve, DeviceSpeed
from .timing import Effort, is_asynchronous, seconds_of

LEAST, MOST = 0.7, 3.0
"""Bounds of the correction factors: values beyond them are measurement noise."""


@dataclass(frozen=True)
class _TimedRun:
    """The run of one model: work and seconds of a prompt, a step, and a step of `FEW_ROWS` sequences."""

    prompt: tuple[Work, ...]
    prompt_seconds: float
    step: tuple[Work, ...]
    step_seconds: float
    wide: tuple[Work, ...]
    wide_seconds: float


FEW_ROWS = 4
"""Sequences of the step that calibrates products of few rows."""


def calibrated(curves: Mapping[str, Curve], device: torch.device, effort: Effort) -> DeviceSpeed:
    """Return the speed of a device whose `curves` were measured operation by operation."""
    tiny = _run(32, 4, device, effort)
    raw = DeviceSpeed(curves, 0.0, 0.0, is_asynchronous(device))
    if raw.asynchronous:  # the host launches the operations of so small a model for longer than the device works
        call = tiny.step_seconds / len(tiny.step)
        return replace(raw, call=call, call_cached=call)
    few, many = (_run(width, depth, device, effort) for width, depth in reversed(effort.models))
    call_cached = max(tiny.step_seconds - raw.total(tiny.step, cached=True), 0.1 * tiny.step_seconds) / len(tiny.step)
    call, reading = _solve(
        [
            (float(len(run.step)), _sum(raw, run.step, PRODUCT), run.step_seconds - _rest(raw, run.step))
            for run in (many, few)
        ],
        least=(call_cached, LEAST),
        most=(20 * call_cached, MOST),
    )
    wide = (few.wide_seconds - call * len(few.wide) - _rest(raw, few.wide)) / _sum(raw, few.wide, PRODUCT)
    multiplying, moving = _solve(
        [
            (_sum(raw, run.prompt, PRODUCT), _sum(raw, run.prompt, MOVE), run.prompt_seconds - call * len(run.prompt))
            for run in (many, few)
        ],
        least=(LEAST, LEAST),
        most=(MOST, 2 * MOST),
    )
    factors = Curve((1.0, FEW_ROWS, effort.prompt), (reading, min(max(wide, LEAST), MOST), multiplying))
    corrected = {name: _scaled(name, curve, factors, moving) for name, curve in curves.items()}
    return DeviceSpeed(corrected, call, call_cached)


def _solve(
    rows: list[tuple[float, float, float]], least: tuple[float, float], most: tuple[float, float]
) -> tuple[float, float]:
    """Return x and y with a x + b y = c for both rows (a, b, c), clamped to the bounds."""
    (a1, b1, c1), (a2, b2, c2) = rows
    determinant = a1 * b2 - a2 * b1
    y = (a1 * c2 - a2 * c1) / determinant if abs(determinant) > 1e-18 else 1.0
    y = min(max(y, least[1]), most[1])
    x = ((c1 - b1 * y) / a1 + (c2 - b2 * y) / a2) / 2 if a1 > 0 and a2 > 0 else 1.0
    return min(max(x, least[0]), most[0]), y


def _sum(speed: DeviceSpeed, works: tuple[Work, ...], kind: str) -> float:
    return sum(speed.seconds(work) for work in works if work.kind == kind)


def _rest(speed: DeviceSpeed, works: tuple[Work, ...]) -> float:
    return sum(speed.seconds(work) for work in works if work.kind != PRODUCT)


def _scaled(name: str, curve: Curve, factors: Curve, moving: float) -> Curve:
    if name == MOVE:
        return replace(curve, values=tuple(value * moving for value in curve.values))
    if name.endswith(CACHED) or name.startswith((CONVOLUTION, POINTWISE)):
        return curve
    scaled = (value * factors.at(rows) for rows, value in zip(curve.sizes, curve.values, strict=True))
    return replace(curve, values=tuple(scaled))


def _run(width: int, depth: int, device: torch.device, effort: Effort) -> _TimedRun:
    """Run a transformer of `depth` layers of `width`; return its work and seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=depth,
        num_attention_heads=max(width // 64, 2),
        num_key_value_heads=max(width // 64, 2),
        vocab_size=4 * width,
        max_position_embeddings=2**20,
    )
    model = LlamaForCausalLM(config).eval()
    prompt, step = works_of(model, 1, effort.prompt + 1, device)
    _, wide = works_of(model, FEW_ROWS, 2, device)
    model.to(device)

    def forward(ids: torch.Tensor, cache: object = None) -> object:
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def timed(work: Callable[[], object]) -> float:
        return seconds_of(work, device, 2 * effort.at_least, 2 * effort.repeats - 1)

    ids = torch.zeros(1, effort.prompt, dtype=torch.long, device=device)
    column = torch.zeros(FEW_ROWS, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        return _TimedRun(
            prompt,
            timed(partial(forward, ids)),
            step,
            timed(partial(forward, ids[:, :1], forward(ids))),
            wide,
            timed(partial(forward, column, forward(column))),
        )


def works_of(model: torch.nn.Module, batch_size: int, context: int, device: torch.device) -> list[tuple[Work, ...]]:
    """Return the work of the prompt and of the last step of a plain call of the model."""
    from ..profile import profile_model

    profile = profile_model(model, batch_size=batch_size, context_length=context, new_tokens=1, device_type=device.type)
    return [tuple(work for works in phase.trace_on(HOST).work().values() for work in works) for phase in profile.phases]
