"""Experts that the host computes while the link fetches others: the same bits, and the counters that tell of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import HOST, virtual
from bigmodel.dispatch import dispatch_model, from_pretrained, get_plan, undispatch
from bigmodel.plan.result.expert_split import ExpertSplit
from tests.examples import few

from ...examples import some
from ..mixtures import EXPERT_BYTES, LAYERS, deepseek_v3, experts_of, mixtral, qwen2_moe, qwen3_moe, tokens

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"
IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]
HALVES = ExpertSplit(fetch=1.0, compute=1.0, start=0.0, below=100)
ALL_ON_HOST = ExpertSplit(fetch=1e9, compute=1.0, start=0.0, below=100)
NONE_ON_HOST = ExpertSplit(fetch=1.0, compute=1e9, start=0.0, below=100)


def logits(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs).logits.cpu()


def resident(build: Callable[[], nn.Module], implementation: str = "grouped_mm") -> nn.Module:
    model = build()
    model.set_experts_implementation(implementation)
    return model.to(DEVICE)


def divided(
    build: Callable[[], nn.Module], split: ExpertSplit, implementation: str = "grouped_mm", slots: int = 4
) -> nn.Module:
    """Return a model whose experts are all in host memory, dispatched by a plan with `split`."""
    model = build()
    model.set_experts_implementation(implementation)
    dispatch_model(model, {"": HOST}, main_device=0, expert_cache=slots * EXPERT_BYTES)
    plan = replace(get_plan(model), expert_split=split)
    return dispatch_model(undispatch(model), plan)


def stats(model: nn.Module) -> dict[str, float]:
    return model.dispatch_stats()["experts"][DEVICE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "implementation"),
    [
        (qwen2_moe, "grouped_mm"),
        pytest.param(qwen3_moe, "batched_mm", marks=pytest.mark.long),
        pytest.param(deepseek_v3, "eager", marks=pytest.mark.long),
        *((mixtral, implementation) for implementation in some(IMPLEMENTATIONS, first=0)),
    ],
)
def test_outputs_are_those_of_the_resident_model(build: Callable[[], nn.Module], implementation: str) -> None:
    whole = resident(build, implementation)
    expected = {count: logits(whole, tokens(count).to(DEVICE)) for count in (1, 5)}
    divides = implementation != "eager"  # adds up expert after expert, whatever the split
    for split in (HALVES, ALL_ON_HOST, NONE_ON_HOST) if divides and build is mixtral else (HALVES,):
        model = divided(build, split, implementation, slots=1)
        for count in (1, 5, 1):
            assert torch.equal(logits(model, tokens(count)), expected[count])
        assert bool(stats(model)["on_host"]) == (split is not NONE_ON_HOST and divides)


@pytest.mark.slow
@settings(max_examples=few(2), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    split=st.builds(ExpertSplit, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 3), st.integers(1, 9)),
    slots=st.integers(1, 24),
    implementation=st.sampled_from(["grouped_mm", "batched_mm"]),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_any_division_and_any_schedule_gives_the_same_bits(
    split: ExpertSplit, slots: int, implementation: str, seed: int | None
) -> None:
    virtual.enable(count=2, strict=True, seed=seed, late_compute=True)
    expected = resident(mixtral, implementation)
    model = divided(mixtral, split, implementation, slots)
    for count in (1, 3, 1):
        assert torch.equal(logits(model, tokens(count)), logits(expected, tokens(count).to(DEVICE)))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_half_of_the_missing_experts_are_computed_on_the_host_where_both_take_as_long(implementation: str) -> None:
    model = divided(mixtral, HALVES, implementation, slots=2)
    logits(model, tokens(1))
    assert stats(model)["misses"] == 2 * LAYERS
    assert stats(model)["on_host"] == LAYERS - 1  # those of the first layer fill the cache
    assert stats(model)["fetches"] == LAYERS + 1


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_single_expert_is_computed_on_the_host(implementation: str) -> None:
    build = partial(mixtral, num_experts_per_tok=1)
    model = divided(build, ALL_ON_HOST, implementation, slots=1)
    assert torch.equal(logits(model, tokens(1)), logits(resident(build, implementation), tokens(1).to(DEVICE)))
    assert stats(model)["fetches"] == 1  # the slot was empty
    assert stats(model)["on_host"] == LAYERS - 1


@pytest.mark.slow
def test_the_cache_is_filled_before_the_host_computes() -> None:
    model = divided(mixtral, ALL_ON_HOST, slots=2 * LAYERS)
    for _ in range(2):
        logits(model, tokens(1))
    assert stats(model)["fetches"] == stats(model)["hits"] == 2 * LAYERS
    assert stats(model)["on_host"] == 0


@pytest.mark.slow
def test_a_generated_text_is_that_of_the_resident_model() -> None:
    prompt = tokens(3)
    expected = resident(mixtral).generate(prompt.to(DEVICE), max_new_tokens=6, do_sample=False).cpu()
    model = divided(mixtral, replace(HALVES, below=2))
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert stats(model)["on_host"]


def test_larger_calls_fetch_all() -> None:
    model = divided(mixtral, replace(ALL_ON_HOST, below=5), slots=24)
    logits(model, tokens(5))
    assert stats(model)["on_host"] == 0
    assert stats(model)["fetches"] == stats(model)["misses"]


@pytest.mark.slow
def test_changed_weights_are_seen_by_the_next_forward() -> None:
    model, expected = divided(mixtral, HALVES), resident(mixtral)
    logits(model, tokens(1))
    for changed in (model, expected):
        with torch.no_grad():
            experts_of(changed, 0).down_proj.mul_(0.5)
        own = experts_of(changed, 1)
        own.gate_up_proj = nn.Parameter(own.gate_up_proj.detach() + 1)
    for _ in range(2):
        assert torch.equal(logits(model, tokens(1)), logits(expected, tokens(1).to(DEVICE)))


@pytest.mark.slow
def test_weights_on_disk_and_in_another_dtype_are_fetched(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, {"": 0, "model.layers": "disk"}, dtype=torch.bfloat16)
    plan = replace(get_plan(model), expert_split=ALL_ON_HOST)
    model = dispatch_model(undispatch(model), plan)
    assert torch.equal(logits(model, tokens(1)), logits(mixtral().to(DEVICE, torch.bfloat16), tokens(1).to(DEVICE)))
    assert stats(model)["on_host"] == 0


@pytest.mark.slow
def test_threads_share_the_cache() -> None:
    expected = resident(mixtral)
    inputs = [(tokens(count) + count) % 64 for count in (1, 2, 5, 9)]
    outputs = [logits(expected, tensor.to(DEVICE)) for tensor in inputs]
    model = divided(mixtral, HALVES)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(2):
            which = (number + turn) % len(inputs)
            if not torch.equal(logits(model, inputs[which]), outputs[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_an_error_on_the_host_leaves_nothing_held() -> None:
    model = divided(mixtral, HALVES)
    expected = logits(model, tokens(1))

    def fail(*_: object) -> None:
        raise ValueError("asked to fail")

    failing = experts_of(model, 1).act_fn.register_forward_hook(fail)
    with pytest.raises(ValueError, match="asked to fail"):
        logits(model, tokens(1))
    failing.remove()
    assert torch.equal(logits(model, tokens(1)), expected)
    undispatch(model)
