"""Blocks that are streamed for prompts and computed on the host in steps.

The models here attend by plain products, which are the same on the host and on a virtual accelerator: fused attention
is not, and would differ in the last bits.
"""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StaticCache,
)

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.host_or_device import HostOrDevice, tokens_of
from bigmodel.dispatch.dispatch import place_and_attach
from bigmodel.dispatch.placement.options import Options
from bigmodel.dispatch.placement.resolve import resolve_given
from bigmodel.plan import plan
from bigmodel.profile import profile_model
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly

from ...examples import alike
from ...plan.machines import machine
from ..interrupting import interrupted_at
from ..models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

STREAMED = (0, 1, 3)
"""Layers of the models here that lie on the host."""

BELOW = 6
"""Calls of fewer tokens than this are computed there."""

PROMPT = torch.arange(16).view(2, 8)


def host_or_device(model: Any) -> Any:
    """Dispatch a model such that some layers run on the host with few tokens, and on the accelerator with many."""
    devices: dict[str, Any] = {"": 0, **{f"model.layers.{layer}": "cpu" for layer in STREAMED}}
    below = {name: BELOW for name in devices if name}
    options = Options(skip_keys=model._skip_keys_device_placement)
    return place_and_attach(model, resolve_given(model, devices, computed_below=below), options)


def devices_seen(layer: int, model: Any) -> list[str]:
    """Return a list that gets the device on which each call of a layer sees its weights from now on."""
    seen: list[str] = []
    model.model.layers[layer].mlp.up_proj.register_forward_pre_hook(
        lambda module, _: seen.append(str(module.weight.device))
    )
    return seen


def plain_llama(layers: int = 4, **sizes: int) -> LlamaForCausalLM:
    model = llama(layers, **sizes)
    model.set_attn_implementation("eager")
    return model


def gemma() -> Gemma3ForCausalLM:
    """Return a tiny model, every second layer of which sees the last four tokens alone."""
    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=64,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attn_implementation="eager",
        )
    ).eval()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            num_local_experts=4,
            attn_implementation="eager",
        )
    ).eval()


def generated(model: Any, **options: Any) -> torch.Tensor:
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    result: torch.Tensor = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **asked)
    return result


@pytest.mark.slow
@alike(
    ("make", "cache"),
    [(plain_llama, "static"), (mixtral, None), (gemma, "static"), (gemma, None), (mixtral, "static")],
    first=1,
)
def test_a_text_is_the_one_of_the_whole_model(make: Any, cache: str | None) -> None:
    model = make()
    expected = generated(copy.deepcopy(model), cache_implementation=cache)
    assert torch.equal(generated(host_or_device(model), cache_implementation=cache), expected)


@pytest.mark.slow
def test_beams_and_several_turns_give_the_same_text_too() -> None:
    model = plain_llama()
    plain = copy.deepcopy(model)
    host_or_device(model)
    assert torch.equal(generated(model, num_beams=3), generated(plain, num_beams=3))
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    more = torch.arange(20).view(2, 10)
    with torch.no_grad():
        for ids in (PROMPT, PROMPT[:, :1], PROMPT[:, :2], more, PROMPT[:, :1]):
            ours, theirs = (one(ids, past_key_values=c).logits for one, c in zip((model, plain), caches))
            assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_every_logit_has_the_bits_of_the_resident_model() -> None:
    model = plain_llama()
    resident = copy.deepcopy(model).to("virtual:0")
    host_or_device(model)
    with torch.no_grad():
        for ids in (PROMPT, PROMPT[:, :2]):
            assert torch.equal(model(ids).logits, resident(ids.to("virtual:0")).logits.cpu())


@pytest.mark.slow
def test_weights_come_to_the_device_for_a_prompt_and_not_for_a_step() -> None:
    model = host_or_device(plain_llama())
    seen = devices_seen(1, model)
    with torch.no_grad():
        cache = model(PROMPT, use_cache=True).past_key_values
        model(PROMPT[:, :1], past_key_values=cache)
    assert seen == ["virtual:0", "cpu"]


@pytest.mark.slow
def test_a_prompt_moves_weights_and_a_step_activations_and_the_cache_once() -> None:
    model = host_or_device(plain_llama())
    weights = sum(parameter.nbytes for layer in STREAMED for parameter in model.model.layers[layer].parameters())
    stats = model.dispatch_stats()["virtual:0"]
    with torch.no_grad():
        model(PROMPT, use_cache=True)  # ends with fetching what the next prompt begins with
        before = model.dispatch_stats()["virtual:0"]["bytes_from_ram"]
        cache = model(PROMPT, use_cache=True).past_key_values
        after = model.dispatch_stats()["virtual:0"]["bytes_from_ram"]
        assert after - before == weights
        kept = sum(cache.layers[layer].keys.nbytes + cache.layers[layer].values.nbytes for layer in STREAMED)
        moved = []
        for _ in range(3):
            started = virtual.link(0).bytes_to_host
            model(PROMPT[:, :1].to("virtual:0"), past_key_values=cache)
            moved.append(virtual.link(0).bytes_to_host - started)
    assert model.dispatch_stats()["virtual:0"]["bytes_from_ram"] == after
    assert stats["bytes_from_ram"] == 0
    longer = moved[2] - moved[1]
    assert longer < 64, "activations alone, with a mask that grows"
    assert moved[0] == moved[1] - longer + kept, "and the cache, once"


@pytest.mark.slow
def test_the_cache_lies_where_it_is_written_to() -> None:
    model = host_or_device(plain_llama())
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        for tokens, device in ((8, "virtual:0"), (1, "cpu"), (1, "cpu"), (8, "virtual:0")):
            model(PROMPT[:, :tokens], past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                expected = device if index in STREAMED else "virtual:0"
                assert {str(layer.keys.device), str(layer.values.device), str(layer.device)} == {expected}


@pytest.mark.slow
def test_device_memory_is_slots_and_residents_and_comes_back() -> None:
    model = host_or_device(plain_llama())
    gc.collect()
    held = memory_allocated(0)
    with torch.no_grad():
        cache = model(PROMPT, use_cache=True).past_key_values
        model(PROMPT[:, :1], past_key_values=cache)
    resident = cache.layers[2].keys.nbytes + cache.layers[2].values.nbytes
    gc.collect()
    assert memory_allocated(0) == held + resident
    del cache
    gc.collect()
    assert memory_allocated(0) == held


def test_state_that_a_block_writes_stays_whereever_it_is_computed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    place_and_attach(model, resolve_given(model, {"": 0, "1": "cpu"}, computed_below={"1": BELOW}), Options())
    for rows in (8, 3, 2, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(model(x), plain(x))
    undispatch(model)
    for ours, theirs in zip(model.buffers(), plain.buffers()):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_model() -> None:
    model = plain_llama()
    plain = copy.deepcopy(model)
    host_or_device(model)
    for ids in (PROMPT, PROMPT[:, :2]):
        for one in (model, plain):
            one(input_ids=ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)


@pytest.mark.slow
def test_a_forward_that_raises_leaves_weights_where_they_were() -> None:
    model = host_or_device(plain_llama())
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    for ids in (PROMPT, PROMPT[:, :1]):
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(ids)
    hook.remove()
    assert {str(p.device) for layer in STREAMED for p in model.model.layers[layer].parameters()} == {"cpu"}
    with torch.no_grad():
        model(PROMPT)
        model(PROMPT[:, :1])


@pytest.mark.long
@pytest.mark.slow
def test_threads_may_prompt_and_step_at_once() -> None:
    model = plain_llama()
    plain = copy.deepcopy(model)
    host_or_device(model)
    with torch.no_grad():
        expected = {tokens: plain(PROMPT[:, :tokens]).logits for tokens in (1, 2, 4, 8)}
    wrong: list[int] = []

    def work(tokens: int) -> None:
        with torch.no_grad():
            for _ in range(6):
                if not torch.equal(model(PROMPT[:, :tokens]).logits, expected[tokens]):
                    wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "threads wait for each other for ever"
    assert wrong == []


def test_an_interrupt_at_any_moment_leaves_the_block_free_for_everybody() -> None:
    turns = HostOrDevice(BELOW, ())
    number = 0
    while interrupted_at(number, lambda: turns.visit(True, lambda _: turns.visit(True, list))):
        with ThreadPoolExecutor(1) as another:
            assert another.submit(turns.visit, False, lambda _: True).result(timeout=30), number
        number += 1
    assert number > 10


def test_a_part_tied_to_one_on_the_device_is_always_streamed() -> None:
    model = plain_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    devices: dict[str, Any] = {"": 0, "lm_head": "cpu", "model.layers.1": "cpu"}
    plain = copy.deepcopy(model)
    resolved = resolve_given(model, devices, computed_below={"lm_head": 100, "model.layers.1": 100})
    place_and_attach(model, resolved, Options(skip_keys=["past_key_values"]))
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, plain(PROMPT).logits)


@pytest.mark.slow
def test_a_plan_decides_the_thresholds_and_its_budgets_hold() -> None:
    model = plain_llama(layers=6, hidden_size=128, intermediate_size=256, max_position_embeddings=256)
    plain = copy.deepcopy(model)
    profile = profile_model(model, batch_size=2, context_length=128, new_tokens=4, device_type="virtual")
    budgets = {0: profile.weights // 2 + profile.activations + sum(profile.kv_cache), "cpu": 10**9}
    speeds = machine(link=3e8, host=4e-9)
    found = plan(profile, budgets, offload="auto", objective="throughput", machine=speeds)
    assert found.computed_below
    ids = torch.arange(248).view(2, 124) % 64
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model, found, skip_keys=model._skip_keys_device_placement)
    reset_peak_memory(0)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, **asked)
    peak = max_memory_allocated(0) - before
    assert peak <= found.devices[0].total <= budgets[0]
    assert torch.equal(text, plain.generate(ids, attention_mask=mask, **asked))


def test_tokens_are_rows_of_features() -> None:
    assert tokens_of((torch.zeros(2, 5, 7),), {}) == 10
    assert tokens_of((), {"hidden_states": torch.zeros(5, 7)}) == 5
    assert tokens_of((torch.zeros(2, 5, dtype=torch.long),), {}) == 10
    assert tokens_of((), {}) == 0


@pytest.mark.slow
def test_weights_that_are_written_to_between_prompts_are_fetched_again() -> None:
    """Its weights are of PyTorch's own classes, which do not tell of a write through ``.data``."""
    resident, model = plain_llama().to("virtual:0"), host_or_device(plain_llama())
    prompt = PROMPT.to("virtual:0")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(prompt).logits, resident(prompt).logits)
            torch.get_device_module("virtual").synchronize()
            for each in (model, resident):
                for parameter in each.model.layers.parameters():
                    parameter.data.mul_(1.5)
        assert torch.equal(model(prompt).logits, resident(prompt).logits)
