"""Calls of attention with a cache are replayed where they change their own layer of it alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from bigmodel.profile import Workload, profile_units
from bigmodel.profile.trace.cached_layer import CachedLayer, is_cache
from bigmodel.profile.trace.dry_run import Phase, dry_run
from bigmodel.profile.trace.generation import keeps_mask

from ..models import tiny_llama

LAYERS = 3

Forward = Callable[..., Any]


def recorded(monkeypatch: pytest.MonkeyPatch, first: Forward | None = None, **work: Any) -> tuple[int, list[Phase]]:
    """Return how often attention ran, and what is recorded, after comparing that with what running all calls records.

    Args:
        monkeypatch: replaces the forward of attention.
        first: called with its arguments before it.
        work: the workload.
    """
    keeps_mask()  # runs a model of its own, once in a process
    plain, calls = LlamaAttention.forward, []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        if first is not None:
            first(module, kwargs["past_key_values"])
        return plain(module, *args, **kwargs)

    model = tiny_llama(num_hidden_layers=LAYERS)
    units, workload = profile_units(model), Workload(2, 9, None, **work)
    with monkeypatch.context() as patched:
        patched.setattr(LlamaAttention, "forward", counted)
        replayed = dry_run(model, units, workload, torch.device("cpu"))
        ran = len(calls)
        calls.clear()
        every = dry_run(model, units, workload, torch.device("cpu"), every_layer=True)
    assert [phase.name for phase in every] == ["prefill", "decode"]
    assert replayed == every
    return len(calls) - ran, replayed


@pytest.mark.slow
def test_attention_runs_once_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    spared, phases = recorded(monkeypatch)
    forwards = sum(1 + len(phase.also) for phase in phases)
    assert spared >= forwards * (LAYERS - 1)


@pytest.mark.slow
def test_old_keys_are_freed_where_the_call_freed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, step) = recorded(monkeypatch)
    assert len(step.trace.initial) >= 2 * LAYERS
    freed = {event.storage for event in step.trace.events if type(event).__name__ == "Free"}
    kept = [held for held in step.trace.initial if held.storage not in freed and held.unit >= 0]
    assert not kept  # keys and values of the text so far


@pytest.mark.slow
def test_attention_that_reads_another_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_first(_module: nn.Module, cache: Any) -> None:
        cache.layers[0].get_seq_length()

    spared, _ = recorded(monkeypatch, read_first)
    alone, _ = recorded(monkeypatch)
    assert spared < alone


@pytest.mark.slow
def test_attention_that_changes_the_cache_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(_module: nn.Module, cache: Any) -> None:
        cache.calls = getattr(cache, "calls", 0) + 1

    spared, _ = recorded(monkeypatch, count)
    assert not spared


@pytest.mark.slow
def test_a_static_cache_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, cache="static")


def watched(act: Callable[[Any], object]) -> set[int]:
    """Return the positions of other layers than number 1 that a function accesses in a cache of three."""
    cache = SimpleNamespace(layers=["a", "b", "c"])
    layer = CachedLayer.of(cache, 1)
    assert layer is not None
    plain = cache.layers
    module = nn.Module()
    module.layer_idx = 1
    with layer.watched(module) as others:
        cache.own = module.layer_idx
        act(cache)
    assert type(module.layer_idx) is int
    assert cache.layers is plain
    return others


def test_accesses_of_other_layers_are_noted() -> None:
    assert watched(lambda cache: (cache.layers[cache.own], len(cache.layers))) == set()
    assert watched(lambda cache: cache.layers[1]) == {1}
    assert watched(lambda cache: cache.layers[0]) == {0}
    assert watched(lambda cache: [*cache.layers])
    assert watched(lambda cache: cache.layers[:1])
    assert watched(lambda cache: cache.layers.append("d"))
    assert watched(lambda cache: cache.layers.__setitem__(1, "d"))


def test_layers_that_are_added_stay() -> None:
    cache = SimpleNamespace(layers=["a"])
    layer = CachedLayer.of(cache, 0)
    assert layer is not None
    with layer.watched(nn.Module()):
        cache.layers.append("b")
    assert cache.layers == ["a", "b"]
    assert CachedLayer.of(cache, 2) is None


def test_caches_are_those_with_layers() -> None:
    assert is_cache(DynamicCache())
    assert not any(map(is_cache, (None, {}, nn.Linear(1, 1), SimpleNamespace(layers=[]))))
