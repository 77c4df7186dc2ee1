"""Plans of models that are resident on several accelerators: stages of even times within the budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bigmodel.plan import Plan, plan
from bigmodel.profile import Profile
from bigmodel.profile.machine.machine import MachineProfile

from ...examples import alike
from ..machines import computing, llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")

DEEP = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12}


def budgets(of: Profile, *shares: float) -> dict[Any, int]:
    """Budgets of accelerators that hold these shares of the weights beside what a forward takes."""
    sizes = {
        index: int(share * of.weights) + of.activations + sum(of.kv_cache) + 2**16 for index, share in enumerate(shares)
    }
    return {**sizes, "cpu": 2**40}


def stage_seconds(made: Plan) -> list[float]:
    assert made.stages is not None
    return list(made.stages.step_seconds(made.batch_size))


def within(made: Plan, given: Mapping[Any, int]) -> bool:
    return all(device.total <= given[key] for key, device in made.devices.items() if key != "disk")


@pytest.mark.parametrize("known", [None, machine(1e13, accelerator=1e-10)], ids=["nominal", "measured"])
@alike("count", [3, 4, 2], first=2)
def test_the_slowest_stage_is_close_to_the_mean(count: int, known: MachineProfile | None) -> None:
    of = llama_profile(**DEEP)
    given = budgets(of, *[1 / count + 0.06] * count)
    made = plan(of, given, machine=known)
    assert len({part.runs_on for part in made.parts}) == count
    seconds = stage_seconds(made)
    # Layers are whole: a stage may have a part of one more than the mean.
    layer = sum(seconds) / 12
    assert max(seconds) <= sum(seconds) / count + layer
    assert within(made, given)


def test_accelerators_that_are_not_needed_stay_free() -> None:
    of = llama_profile(**DEEP)
    assert {part.runs_on for part in plan(of, budgets(of, 1.1, 1.1)).parts} == {0}
    assert {part.runs_on for part in plan(of, budgets(of, 0.9, 0.9, 0.9)).parts} == {0, 1}


def test_a_small_budget_bounds_its_stage() -> None:
    of = llama_profile(**DEEP)
    given = budgets(of, 0.3, 0.9)
    made = plan(of, given)
    layers = Counter(part.runs_on for part in made.parts if "layers" in part.name)
    assert 0 < layers[0] < layers[1]
    assert within(made, given)


def test_a_slower_accelerator_has_fewer_layers() -> None:
    of = llama_profile(**DEEP)
    known = machine(1e13, accelerator=1e-10)
    slow = machine(1e13, accelerator=3e-10).devices["virtual:0"]
    uneven = replace(known, devices={**known.devices, "virtual:1": slow})
    made = plan(of, budgets(of, 0.9, 0.9), machine=uneven)
    layers = Counter(part.runs_on for part in made.parts if "layers" in part.name)
    assert layers[0] > 2 * layers[1] > 0


@pytest.mark.slow
def test_for_throughput_a_model_that_fits_on_one_is_divided_over_all() -> None:
    of = llama_profile(batch_size=16, **DEEP)
    given = budgets(of, 2.0, 2.0)
    made = plan(of, given, objective="throughput", machine=computing())
    assert {part.runs_on for part in made.parts} == {0, 1}
    assert made.stages is not None
    assert made.stages.gain(16, made.stages.steps(16)) > 1.1
    assert made.prediction is not None
    assert set(made.prediction.seconds_saved_per_gib.values()) == {0.0}
    assert {part.runs_on for part in plan(of, given, objective="latency", machine=computing()).parts} == {0}


def test_for_one_sequence_it_is_not() -> None:
    of = llama_profile(**DEEP)
    made = plan(of, budgets(of, 2.0, 2.0), objective="throughput", machine=computing())
    assert {part.runs_on for part in made.parts} == {0}


@pytest.mark.slow
def test_a_head_that_shares_the_embedding_stays_with_it() -> None:
    of = llama_profile(tie_word_embeddings=True, vocab_size=8192, **DEEP)
    made = plan(of, budgets(of, 0.8, 0.8), machine=computing())
    where = made.execution
    assert where["model.embed_tokens"] == where["lm_head"] == 0
    layers = Counter(key for name, key in where.items() if "layers" in name)
    assert layers[0] < layers[1]


def test_other_strategies_stay_as_they_are() -> None:
    of = llama_profile(**DEEP)
    made = plan(of, budgets(of, 0.9, 0.9), "sequential")
    layers = Counter(part.runs_on for part in made.parts if "layers" in part.name)
    assert layers[0] > layers[1]
