"""Functions with a cache that a forward calls: a dry run leaves nothing in them and finds nothing there."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from bigmodel.profile import profile_model
from bigmodel.profile.trace.cached_results import caches_of, without_cached_results


@lru_cache(maxsize=4)
def positions(count: int) -> torch.Tensor:
    return torch.arange(count).float()


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    cached = lru_cache(maxsize=4)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


class Positioned(nn.Linear):
    """Adds positions that two functions compute once for each length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + positions(x.shape[-1]) + self.shift(x.shape[-1])

    @staticmethod
    @wrapped
    def shift(count: int) -> torch.Tensor:
        return torch.ones(count)


def test_a_forward_after_a_dry_run_computes_with_real_tensors() -> None:
    model, x = Positioned(8, 8), torch.ones(2, 8)
    profile_model(model, sample_inputs=(x,))
    assert not isinstance(positions(8), FakeTensor)
    assert not isinstance(model(x), FakeTensor)


def test_what_a_forward_has_computed_before_is_allocated_in_the_dry_run() -> None:
    model, x = Positioned(8, 8), torch.ones(2, 8)
    first = profile_model(model, sample_inputs=(x,)).activations
    model(x)
    assert profile_model(model, sample_inputs=(x,)).activations == first


def test_caches_of_the_files_of_a_models_classes_are_cleared() -> None:
    model = nn.Sequential(Positioned(8, 8))
    model(torch.ones(2, 8))
    assert len(list(caches_of(model))) == 2
    with without_cached_results(model):
        assert [cache.cache_info().currsize for cache in caches_of(model)] == [0, 0]
