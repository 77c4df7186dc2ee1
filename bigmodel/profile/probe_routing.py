"""Measures what routing takes in a mixture: tokens are sorted by expert, counted and put back, in many small steps.

Each is an operation whose bytes are next to nothing, and takes longer than most that are; what they take together is
told by a mixture so small that it does little else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .calibrate import works_of
from .effort import Effort
from .machine import Curve, DeviceSpeed
from .stopwatch import seconds_of
from .work import ROUTE

LAYERS = 4


def with_routing(speed: DeviceSpeed, device: torch.device, effort: Effort) -> DeviceSpeed:
    """Return `speed` with what a mixture's step takes beyond its operations, for each time that it routes."""
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
