"""The fallback runner: one forward per sequence, with the model's own attention and cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from bigmodel.server.adapters.rows import Adapters, Rows
from bigmodel.server.engine.compute.attention import attending_in_parts
from bigmodel.server.engine.compute.hidden import taking_states
from bigmodel.server.engine.compute.host_linear import HostLinear
from bigmodel.server.engine.compute.runner import CACHE_NAMES, input_device, readable
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

KEPT = "logits_to_keep"
"""Argument of a forward that says of how many of the last tokens it gives logits."""


class PlainRunner:
    """Computes one sequence after the other.

    ``cached`` False recomputes every sequence from its first token in each step: slow, for models that have no cache or
    one that cannot be continued by several tokens.
    """

    name = "plain"
    row_multiple = 1
    host_linear: HostLinear = "torch"

    def __init__(self, model: torch.nn.Module, *, cached: bool = True) -> None:
        self.model = model
        self.device = input_device(model)
        self.cached = cached
        self.adapters: Adapters | None = None
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), None)
        self._takes_positions = "position_ids" in parameters
        self._keeps_last: dict[str, Any] = {KEPT: 1} if KEPT in parameters else {}
        if cached and self._cache_name is None:
            raise ValueError(f"{type(model).__name__} takes no cache")

    def run(self, batch: Seq[ScheduledTokens]) -> list[torch.Tensor | None]:
        """See :meth:`.runner.Runner.run`."""
        found = []
        for scheduled in batch:
            rows = Rows(scheduled.sequence.request.adapter, 0, len(scheduled.sequence))
            with nullcontext() if self.adapters is None else self.adapters.step([rows]):
                found.append(self._run_one(scheduled))
        return found

    def _run_one(self, scheduled: ScheduledTokens) -> torch.Tensor | None:
        sequence, start = scheduled.sequence, scheduled.sequence.computed
        end = start + scheduled.tokens
        wanted = scheduled.samples or scheduled.all_logits
        assert sequence.kv is not None
        pooled = scheduled.pooled_rows
        if pooled is not None:
            states = self._states(scheduled, end)[start - end :]
            return states[len(states) - pooled :] if pooled else None
        if self.cached:
            cache, first = sequence.kv.model_cache, start
            if cache is None:
                cache, first = self.empty_cache(), 0
            sequence.kv.model_cache = None  # a forward that raises leaves it incomplete
            logits = self.forward(sequence.token_slice(first, end), first, cache)[start - first :]
            sequence.kv.model_cache = cache
        elif wanted:
            logits = self.forward(sequence.token_slice(0, end))[start:]
        if not wanted:
            return None
        return logits if scheduled.all_logits else logits[-1:]

    def _states(self, scheduled: ScheduledTokens, end: int) -> torch.Tensor:
        """States [tokens, width] of a sequence, at least of the tokens of this step."""
        sequence = scheduled.sequence
        assert sequence.kv is not None
        cache = sequence.kv.model_cache if self.cached else None
        first = 0 if cache is None else sequence.computed
        if self.cached and cache is None:
            cache = self.empty_cache()
        sequence.kv.model_cache = None
        tokens = sequence.token_slice(first, end)
        with taking_states(self.model, range(len(tokens)), [len(tokens) - 1]) as taken:
            self.forward(tokens, first, cache)
        sequence.kv.model_cache = cache
        return readable(taken.states)

    def forward(
        self, tokens: list[int], start: int = 0, cache: DynamicCache | None = None, **options: Any
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of ``tokens`` at positions from ``start`` on, with further arguments of the
        model's forward."""
        arguments: dict[str, Any] = {"use_cache": cache is not None, **options}
        if cache is not None and self._cache_name is not None:
            arguments[self._cache_name] = cache
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=self.device)[None]
        with torch.inference_mode():
            output = self.model(input_ids=torch.tensor([tokens], device=self.device), **arguments)
        return readable(output.logits[0])

    def last_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [vocabulary] of the last of ``tokens``, in no more memory than a plan counts for their positions: no
        others are kept, and their rows attend in parts."""
        with attending_in_parts():
            return self.forward(tokens, **self._keeps_last)[-1].clone()

    def empty_cache(self) -> DynamicCache:
        """A new cache of the model."""
        config: Any = self.model.config
        return DynamicCache(config=config)

    def probe(self) -> None:
        """See :meth:`.runner.Runner.probe`."""
        self._computed(1)

    def _computed(self, tokens: int) -> Any:
        """The cache of so many tokens, if there is one."""
        cache = self.empty_cache() if self.cached else None
        self.forward([0] * tokens, 0, cache)
        return cache

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position, by device; measured by a forward of a few tokens."""
        tokens = 16
        total: dict[str, int] = {}
        if self.cached:
            cache = self._computed(tokens)
            for layer in cache.layers:
                for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                    if isinstance(tensor, torch.Tensor):
                        key = str(tensor.device)
                        total[key] = total.get(key, 0) + -(-tensor.nbytes // tokens)
        # A state of fixed size takes no bytes per position, but the pool counts positions: one byte stands for it.
        return total or {str(self.device): 1}
