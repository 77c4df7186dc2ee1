"""Decode steps: one token per sequence, with a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .harness import elapsed

PROMPT = 16


@dataclass
class Decoder:
    """A model with a prompt in its KV cache, ready to be stepped.

    Attributes:
        model: Any causal language model.
        device: Device of its inputs.
        batch_size: Number of sequences.
    """

    model: nn.Module
    device: str = "cpu"
    batch_size: int = 1
    _cache: Any = field(default=None, init=False, repr=False)
    _token: Any = field(default=None, init=False, repr=False)

    def start(self) -> torch.Tensor:
        """Begin with a fixed prompt and an empty cache; return the logits of the last token."""
        vocabulary = int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        row = torch.arange(1, PROMPT + 1) % vocabulary
        prompt = row.expand(self.batch_size, PROMPT).contiguous().to(self.device)
        self._cache = None
        return self._forward(prompt)

    def step(self) -> torch.Tensor:
        """Feed the likeliest token and return the logits that follow it."""
        return self._forward(self._token)

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed the given token of each sequence, (batch, 1), and return the logits that follow it."""
        return self._forward(tokens)

    def seconds_per_step(self, steps: int, before: Callable[[], None] | None = None) -> float:
        """Start again, run one unmeasured step, and return the mean seconds of the next `steps`.

        Args:
            before: Called before each of these steps; its time is not counted.
        """
        self.start()
        self.step()
        if before is None:
            return elapsed(lambda: [self.step() for _ in range(steps)], self.device) / steps
        seconds = 0.0
        for _ in range(steps):
            before()
            seconds += elapsed(self.step, self.device)
        return seconds / steps

    def logits(self, steps: int) -> torch.Tensor:
        """Return the logits of the prompt and of each of `steps` steps, on the host."""
        return torch.stack([self.start().cpu(), *(self.step().cpu() for _ in range(steps))])

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = output.past_key_values
            logits: torch.Tensor = output.logits[:, -1]
            self._token = logits.argmax(-1, keepdim=True)
        return logits
