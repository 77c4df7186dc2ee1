"""Plans in which the host computes experts that are missing in the cache while the link fetches others."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from bigmodel.errors import PlanError
from bigmodel.plan import Plan, plan
from bigmodel.profile import Profile, profile_model
from tests.dispatch.mixtures import mixtral
from tests.examples import some

from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

LINKS = some([1e9, 1e11, 1e7, 3e8, 3e9, 1e10], first=1)


@cache
def profile(implementation: str = "grouped_mm") -> Profile:
    model = mixtral(hidden_size=128, intermediate_size=256, num_local_experts=16, num_experts_per_tok=4)
    model.set_experts_implementation(implementation)
    return profile_model(model, context_length=16, device_type="virtual")


@cache
def planned(link: float = 1e9, offload: str = "auto", of: Profile | None = None, **options: Any) -> Plan:
    """Return a plan for steps with a budget of a third of the weights; the host takes 1 ns for each of them."""
    of = of or profile()
    budget: dict[Any, Any] = {0: of.weights // 3 + of.activations, "cpu": "1GB"}
    speeds = machine(link, accelerator=1e-11)
    return plan(of, budget, offload=offload, machine=speeds, per_pass=False, **options)


def step(found: Plan) -> float:
    assert found.prediction is not None
    return found.prediction.token


@pytest.mark.long
@pytest.mark.slow
def test_both_at_once_beat_either_alone_where_they_are_about_as_fast() -> None:
    found = planned(1e9)
    assert found.expert_split is not None
    assert "the CPU computes some experts in steps" in str(found)
    assert "while the link fetches the others" in found.explain()
    assert step(found) < 0.8 * min(step(planned(1e9, "stream")), step(planned(1e9, "compute")))


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_no_plan_is_slower_than_streaming_or_computing_all(link: float) -> None:
    assert step(planned(link)) <= min(step(planned(link, "stream")), step(planned(link, "compute")))


@pytest.mark.slow
def test_a_fast_link_fetches_all() -> None:
    found = planned(1e11)
    assert found.expert_split is None
    assert found.expert_cache


@pytest.mark.slow
def test_experts_are_streamed_where_a_smaller_cache_than_usual_fits() -> None:
    """The usual cache is as large as slots for whole layers: here more than the budget."""
    assert step(planned(1e11)) == step(planned(1e11, "stream")) < 0.5 * step(planned(1e11, "compute"))


@pytest.mark.slow
def test_rates_are_those_of_one_expert() -> None:
    split = planned(1e9).expert_split
    assert split is not None
    elements = 3 * 128 * 256
    assert split.fetch == pytest.approx(4 * elements / 1e9, rel=0.01)
    assert split.compute == pytest.approx(1e-9 * elements, rel=0.01)
    assert split.below == 2


@pytest.mark.slow
def test_steps_of_routers_that_choose_again_are_predicted_shorter_and_prompts_are_not() -> None:
    random, again = planned(1e9, "stream"), planned(1e9, "stream", expert_reuse=0.5)
    assert (random.expert_reuse, again.expert_reuse) == (0.0, 0.5)
    assert Plan.from_json(again.to_json()) == again
    assert again.prediction is not None
    assert random.prediction is not None
    assert again.prediction.prefill == random.prediction.prefill
    assert step(planned(1e9, "stream", expert_reuse=1.0)) < step(again) < 0.8 * step(random)


@pytest.mark.long
@pytest.mark.slow
def test_experts_that_the_host_computes_are_not_there_when_they_are_chosen_again() -> None:
    def saved(offload: str) -> float:
        return 1 - step(planned(1e9, offload, expert_reuse=0.5)) / step(planned(1e9, offload))

    assert planned(1e9, "auto", expert_reuse=0.5).expert_split is not None
    assert 0 < saved("auto") < 0.5 * saved("stream")


@pytest.mark.parametrize("given", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_a_reuse_that_is_no_share_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match=r"expert_reuse is .*; give a number from 0 to 1"):
        planned(1e9, expert_reuse=given)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["stream", "compute"])
def test_nothing_is_divided_unless_the_host_may_compute(offload: str) -> None:
    assert planned(1e9, offload).expert_split is None


@pytest.mark.slow
def test_a_function_that_adds_up_expert_after_expert_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.plan.search.search.EXACT", 0)  # which takes a second
    assert planned(1e9, of=profile("eager")).expert_split is None
