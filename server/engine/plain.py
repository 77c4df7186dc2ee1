"""A forward for each sequence, with the model's own attention and cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import DynamicCache

from bigmodel.server.engine.host_linear import HostLinear
from bigmodel.server.engine.runner import input_device, readable, wants_all
from bigmodel.server.engine.scheduler import Grant

_CACHE_NAMES = ("past_key_values", "cache_params")


class PlainRunner:
    """Computes one sequence after the other.

    ``cached`` False computes every sequence from its beginning in each step: slow, for models whose cache
    cannot be continued by more than one token, or that have none.
    """

    name = "plain"
    row_multiple = 1
    host_linear: HostLinear = "torch"

    def __init__(self, model: torch.nn.Module, *, cached: bool = True) -> None:
        self.model = model
        self.device = input_device(model)
        self.cached = cached
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)
        self._takes_positions = "position_ids" in parameters
        if cached and self._cache_name is None:
            raise ValueError(f"{type(model).__name__} takes no cache")

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]:
        return [self._run_one(grant) for grant in grants]

    def _run_one(self, grant: Grant) -> torch.Tensor | None:
        sequence, start = grant.sequence, grant.sequence.computed
        end = start + grant.tokens
        assert sequence.kv is not None
        if not self.cached:
            logits = self.forward(sequence.token_slice(0, end))[start:] if self._needs(grant) else None
        else:
            if sequence.kv.own is None:
                sequence.kv.own = self.empty_cache()
            logits = self.forward(sequence.token_slice(start, end), start, sequence.kv.own)
        if logits is None or not self._needs(grant):
            return None
        return logits if wants_all(grant) else logits[-1:]

    def _needs(self, grant: Grant) -> bool:
        return grant.samples or wants_all(grant)

    def forward(self, tokens: list[int], start: int = 0, cache: DynamicCache | None = None) -> torch.Tensor:
        """Logits [tokens, vocabulary] of ``tokens``, which are at positions from ``start`` on."""
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None and self._cache_name is not None:
            arguments[self._cache_name] = cache
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=self.device)[None]
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens], device=self.device), **arguments).logits[
                0
            ]
        return readable(logits)

    def empty_cache(self) -> DynamicCache:
        """A cache that holds nothing."""
        config: Any = self.model.config
        return DynamicCache(config=config)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position on each device, learnt from a forward of a few tokens."""
        tokens = 16
        total: dict[str, int] = {}
        if self.cached:
            cache = self.empty_cache()
            self.forward([0] * tokens, 0, cache)
            for layer in cache.layers:
                for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                    if isinstance(tensor, torch.Tensor):
                        key = str(tensor.device)
                        total[key] = total.get(key, 0) + -(-tensor.nbytes // tokens)
        # A state of fixed size takes nothing per position; some number is needed to count positions by.
        return total or {str(self.device): 1}
