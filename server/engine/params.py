"""How one request wants its tokens chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """The sampling fields of one request, already validated.

    ``temperature`` 0 is greedy decoding. ``top_k`` 0 and ``top_p`` 1 keep every token; ``min_p`` keeps tokens
    at least that fraction as likely as the likeliest. ``presence_penalty`` and ``frequency_penalty`` are
    subtracted from the logits of tokens generated so far (once, and once per occurrence);
    ``repetition_penalty`` divides positive and multiplies negative logits of every token of prompt and
    output. ``logit_bias`` (token id -> addend) is added last. ``seed`` None draws one from the system.
    ``logprobs`` is the number of alternatives reported with each token (None: no report, 0: the chosen
    token only); they are of the model's own distribution, before any of the adjustments above.
    ``grammar`` is an opaque compiled constraint (see :mod:`bigmodel.server.engine.grammar`).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    grammar: Any = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether any field changes the logits before a token is chosen."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.grammar is not None
        )
