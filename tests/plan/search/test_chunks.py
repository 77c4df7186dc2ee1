"""Chunks of prompts: as large as they may be where the activations of whole prompts leave the accelerator no room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import Plan, plan
from bigmodel.plan.result.plan import Part
from bigmodel.plan.search.chunks import PREFILL_CHUNKS, with_chunks

from ...profile.models import tiny_llama
from ..machines import machine

LAYERS = 4
LONG = 100_000


def plan_of(runs_there: Callable[[int | None], int | None], prompt: int = LONG) -> Callable[[int | None], Plan]:
    """Plans of a model of four layers beside an embedding: `runs_there` says how many layers an accelerator runs with
    each size of chunks, or None if nothing fits."""

    def made(size: int | None) -> Plan:
        there = runs_there(size)
        if there is None:
            raise BudgetError(f"does not fit in chunks of {size}")
        where = [0 if number < there else "cpu" for number in range(LAYERS)]
        layers = [Part(f"layers.{number}", "cpu", key, 100, "", "Layer") for number, key in enumerate(where)]
        parts = (Part("embed", "cpu", "cpu", 150, "", "Embedding"), *layers)
        chunk = size if size is not None and size < prompt else None
        return Plan("M", "auto", 0, {}, parts, context_length=prompt + 8, new_tokens=8, prefill_chunk_size=chunk)

    return made


def test_prompts_are_whole_where_the_accelerator_runs_all_layers() -> None:
    assert with_chunks(plan_of(lambda _: LAYERS), True).prefill_chunk_size is None


@pytest.mark.parametrize("largest", PREFILL_CHUNKS)
def test_the_largest_chunks_are_chosen_with_which_it_does(largest: int) -> None:
    found = with_chunks(plan_of(lambda size: LAYERS if size is not None and size <= largest else 1), True)
    assert found.prefill_chunk_size == largest


def test_whole_prompts_that_do_not_fit_at_all_are_run_in_chunks_also_without_an_accelerator() -> None:
    assert with_chunks(plan_of(lambda size: None if size is None else 0), False).prefill_chunk_size == PREFILL_CHUNKS[0]


def test_smaller_chunks_that_gain_nothing_are_not_chosen() -> None:
    assert with_chunks(plan_of(lambda size: 2), True).prefill_chunk_size is None
    gains = plan_of(lambda size: 1 if size is None else 3)
    assert with_chunks(gains, True).prefill_chunk_size == PREFILL_CHUNKS[0]


def test_chunks_no_shorter_than_the_prompt_are_not_planned() -> None:
    tried: list[int | None] = []

    def runs_there(size: int | None) -> int:
        tried.append(size)
        return 1

    with_chunks(plan_of(runs_there, prompt=1000), True)
    assert tried == [None, 512]


def test_where_nothing_fits_the_error_is_that_of_whole_prompts() -> None:
    with pytest.raises(BudgetError, match="in chunks of None"):
        with_chunks(plan_of(lambda _: None), True)


@pytest.mark.usefixtures("accelerators")
class TestPlan:
    @pytest.mark.slow
    def test_a_long_prompt_is_planned_in_chunks_where_it_does_not_fit(self) -> None:
        shapes = {"context_length": 1100, "new_tokens": 4, "padded": False, "prefill_chunk_size": "auto"}
        model = tiny_llama(max_position_embeddings=2048)
        ample = plan(model, {0: "1GB", "cpu": "1GB"}, **shapes)
        assert ample.prefill_chunk_size is None
        budget = ample.devices[0].total * 3 // 5
        tight = plan(model, {0: budget, "cpu": "1GB"}, **shapes)
        assert tight.prefill_chunk_size == 512
        assert "prompts in chunks of 512" in str(tight)
        assert Plan.from_json(tight.to_json()) == tight
        assert 0 < tight.devices[0].total <= budget

    @pytest.mark.slow
    def test_a_prompt_takes_as_many_passes_as_it_has_chunks(self) -> None:
        model = tiny_llama(max_position_embeddings=2048, intermediate_size=2048)
        shapes = {"context_length": 1025, "new_tokens": 1}
        slow = machine(link=1e6)  # each pass over the weights takes far longer than what it computes
        budgets: dict[int | str, int | str] = {0: "7MB", "cpu": "1GB"}
        chunks = [plan(model, budgets, **shapes, machine=slow, prefill_chunk_size=size) for size in (16, 32)]
        assert all(found.streamed for found in chunks)
        seconds = [found.prediction.prefill / found.prediction.token for found in chunks if found.prediction]  # type: ignore[operator]
        assert seconds[0] == pytest.approx(1024 / 16, rel=0.1)
        assert seconds[1] == pytest.approx(1024 / 32, rel=0.1)

    def test_what_is_no_size_is_refused(self) -> None:
        with pytest.raises(PlanError, match="prefill_chunk_size is 'small'"):
            plan(tiny_llama(), {"cpu": "1GB"}, prefill_chunk_size="small")
        with pytest.raises(PlanError, match="prefill_chunk_size is 0"):
            plan(tiny_llama(), {"cpu": "1GB"}, prefill_chunk_size=0)

    def test_a_changed_plan_says_so(self) -> None:
        found = plan(tiny_llama(), {"cpu": "1GB"}, context_length=32)
        assert "in chunks of 8" in str(replace(found, prefill_chunk_size=8))
