"""Keys and values on the host: the same bits as on the device, within the plan's bytes."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.host_kv_cache import HostKVLayer
from bigmodel.errors import DispatchError
from bigmodel.plan import Plan, plan
from bigmodel.profile import Profile, profile_model
from bigmodel.verify.planned_use import planned_use

from ..models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

LAYERS, NEW_TOKENS = 5, 4


def model() -> Any:
    return llama(LAYERS, hidden_size=64, intermediate_size=64, num_key_value_heads=2, vocab_size=96)


@cache
def profile() -> Profile:
    return profile_model(model(), context_length=56, new_tokens=NEW_TOKENS, device_type="virtual")


def on_device() -> Any:
    """The slow twin: all keys and values on the device."""
    return dispatch_model(model(), {"": 0})


@cache
def expected() -> Any:
    """Return what the slow twin generates."""
    return generated(on_device())


def with_kv_on_host(names: set[str] | None = None) -> Plan:
    """Return a plan that has everything on the device but the keys and values of some layers; None: of all."""
    found = plan(profile(), {0: 10**8, "cpu": 10**9})
    chosen = {f"model.layers.{index}" for index in range(LAYERS)} if names is None else names
    parts = tuple(replace(part, kv_on_host=part.name in chosen) for part in found.parts)
    return replace(found, parts=parts, kv_slots=2)


def generated(found: Any, **options: Any) -> Any:
    ids = torch.arange(52)[None] % 90
    keys = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, **options}
    with torch.inference_mode():
        return found.generate(ids.to("virtual:0"), max_new_tokens=NEW_TOKENS, **keys)


def assert_equal(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences.cpu(), expected.sequences.cpu())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found.logits, expected.logits, strict=True))
    for one, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(one.keys.cpu(), other.keys.cpu())
        assert torch.equal(one.values.cpu(), other.values.cpu())


@pytest.mark.parametrize(
    "names",
    [None, {"model.layers.1"}, {"model.layers.0", "model.layers.3"}, {f"model.layers.{at}" for at in (1, 4)}],
)
def test_tokens_logits_and_cache_are_those_of_a_cache_on_the_device(names: set[str] | None) -> None:
    found = generated(dispatch_model(model(), with_kv_on_host(names)))
    kinds = [isinstance(layer, HostKVLayer) for layer in found.past_key_values.layers]
    assert kinds == [names is None or f"model.layers.{at}" in names for at in range(LAYERS)]
    assert_equal(found, expected())


def test_beams_are_reordered_as_on_the_device() -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert_equal(generated(dispatch_model(model(), with_kv_on_host()), **options), generated(on_device(), **options))


def continued(found: Any, past: Any, change: Any) -> torch.Tensor:
    """Return the logits of two calls, with a change of the cache between them."""
    with torch.inference_mode():
        found(torch.arange(20)[None].to("virtual:0"), past_key_values=past)
        changed = change(past)
        past = past if changed is None else changed
        return found(torch.arange(7)[None].to("virtual:0"), past_key_values=past).logits.cpu()


@pytest.mark.parametrize("change", [lambda past: past.crop(-5), copy.deepcopy, lambda past: past.reset()])
def test_a_cache_may_be_changed_between_calls(change: Any) -> None:
    found = continued(dispatch_model(model(), with_kv_on_host()), DynamicCache(), change)
    assert torch.equal(found, continued(on_device(), DynamicCache(), change))


def test_two_caches_in_turns_do_not_disturb_each_other() -> None:
    found, twin = dispatch_model(model(), with_kv_on_host()), on_device()
    ids = [torch.arange(9)[None], torch.arange(30, 50)[None]]
    pasts, wanted = [DynamicCache(), DynamicCache()], [DynamicCache(), DynamicCache()]
    with torch.inference_mode():
        for _ in range(3):
            for at in (0, 1):
                tokens = ids[at].to("virtual:0")
                got = found(tokens, past_key_values=pasts[at]).logits
                assert torch.equal(got.cpu(), twin(tokens, past_key_values=wanted[at]).logits.cpu())


def test_gradients_to_an_earlier_call_are_refused() -> None:
    found = dispatch_model(model(), with_kv_on_host())
    past = DynamicCache()
    found(torch.arange(9)[None].to("virtual:0"), past_key_values=past)
    with pytest.raises(DispatchError, match=r"torch\.no_grad"):
        found(torch.arange(9)[None].to("virtual:0"), past_key_values=past)


def test_undispatching_leaves_no_hook() -> None:
    found: nn.Module = undispatch(dispatch_model(model(), with_kv_on_host()), "cpu")
    assert not any(module._forward_pre_hooks for module in found.modules())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [450_000, 460_000])
def test_the_peak_is_the_planned_one_and_within_the_budget(budget: int) -> None:
    found = plan(profile(), {0: budget, "cpu": 10**9})
    assert found.kv_on_host
    gc.collect()
    before = memory_allocated(0)
    loaded = dispatch_model(model(), found)
    reset_peak_memory(0)
    with torch.inference_mode():
        planned_use(loaded, found).whole()
    assert max_memory_allocated(0) - before == found.devices[0].total <= budget


@pytest.mark.slow
def test_a_prompt_in_chunks_attends_to_keys_and_values_on_the_host_within_the_plan() -> None:
    chunk = 16
    of = profile_model(
        model(), context_length=56, new_tokens=NEW_TOKENS, device_type="virtual", prefill_chunk_size=chunk
    )
    budget = 310_000
    found = plan(of, {0: budget, "cpu": 10**9})
    assert found.kv_on_host
    assert found.prefill_chunk_size == chunk
    options = {"prefill_chunk_size": chunk}
    assert_equal(generated(dispatch_model(model(), found)), generated(on_device(), **options))
    gc.collect()
    before = memory_allocated(0)
    loaded = dispatch_model(model(), found)
    reset_peak_memory(0)
    with torch.inference_mode():
        planned_use(loaded, found).whole()
    measured = max_memory_allocated(0) - before  # ends of chunks are a little shorter than is planned
    assert 0.99 * found.devices[0].total <= measured <= found.devices[0].total <= budget
