"""Peers over the same model and the same device: what accelerate streams, and what transformers offloads and proposes.

Both run on an accelerator of any kind, a virtual one included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .models import quiet

if TYPE_CHECKING:
    import torch
    from torch import nn


def streamed_by_accelerate(model: nn.Module, device: str, device_map: Mapping[str, Any] | None = None) -> Any:
    """Return a model in host memory whose modules are fetched by accelerate's hooks, in place.

    Args:
        model: The model.
        device: The accelerator that computes it.
        device_map: Where modules lie; those on ``"cpu"`` are fetched. None: all are.
    """
    import accelerate
    import torch

    quiet()
    if device_map is None:
        return accelerate.cpu_offload(model, execution_device=torch.device(device))
    return accelerate.dispatch_model(model, dict(device_map), main_device=torch.device(device), force_hooks=True)


@contextmanager
def cuda_streams() -> Iterator[None]:
    """Within this context what waits for CUDA's default stream waits for the current one of any accelerator.

    transformers' offloaded cache does, and uses no other name of CUDA.
    """
    from unittest import mock

    import torch

    with mock.patch.object(torch.cuda, "default_stream", torch.accelerator.current_stream):
        yield


def always_proposing(draft: Any, tokens: int) -> Any:
    """Return a draft model that proposes so many tokens in each step of transformers' assisted generation."""
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, "constant"
    config.assistant_confidence_threshold = 0
    return draft


@dataclass(frozen=True)
class Generated:
    """A text that transformers generated.

    Attributes:
        tokens: Those of the answer.
        groups: How many of them came at once.
        times: When they did, by `time.perf_counter`.
        forwards: Forwards of the model, with that of the prompt.
    """

    tokens: list[int]
    groups: list[int]
    times: list[float]
    forwards: int

    @property
    def per_step(self) -> float:
        """Tokens of a step after the prompt's."""
        return (len(self.tokens) - self.groups[0]) / (self.forwards - 1)

    @property
    def seconds_of_token(self) -> float:
        """Seconds of a token after those that came with the prompt's forward."""
        return (self.times[-1] - self.times[0]) / (len(self.tokens) - self.groups[0])


def generated(model: Any, prompt: list[int], tokens: int, device: str, **how: Any) -> Generated:
    """Return the most likely tokens after a prompt, by transformers' `generate`.

    Args:
        model: A causal language model.
        prompt: Ids of its tokens.
        tokens: How many are generated.
        device: That of the inputs.
        how: Further arguments of `generate`.
    """
    import torch

    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    arrivals = _Arrivals()
    handle = model.register_forward_pre_hook(count)
    try:
        ids = torch.tensor([prompt]).to(device)
        model.generate(ids, max_new_tokens=tokens, do_sample=False, streamer=arrivals, pad_token_id=0, **how)
    finally:
        handle.remove()
    groups = arrivals.groups[1:]
    found = [token for group in groups for token in group]
    return Generated(found, [len(group) for group in groups], arrivals.times[1:], forwards)


class _Arrivals:
    """A streamer that keeps tokens, the first of which are the prompt's, and when they came."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.groups.append(tokens.flatten().tolist())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
