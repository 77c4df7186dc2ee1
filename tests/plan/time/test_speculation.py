"""Passes in which proposed tokens are verified: those of dense layers cost a fetch, those of mixtures more experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from bigmodel.plan import Plan, plan
from bigmodel.plan.result.speculation import Speculation
from bigmodel.profile import Profile, profile_model
from tests.dispatch.mixtures import mixtral

from ..machines import llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")


@cache
def mixture(batch_size: int = 1) -> Profile:
    model = mixtral(hidden_size=128, intermediate_size=256, num_local_experts=16, num_experts_per_tok=2)
    return profile_model(model, batch_size=batch_size, context_length=16, device_type="virtual")


def planned(of: Profile, link: float = 1e8, draft_tokens: int = 4, share: int = 3, **options: Any) -> Plan:
    budget: dict[Any, Any] = {0: of.weights // share + of.activations + 2**20, "cpu": "1GB"}
    return plan(of, budget, machine=machine(link, accelerator=1e-11), draft_tokens=draft_tokens, **options)


def passes(made: Plan) -> Speculation:
    assert made.speculation is not None
    return made.speculation


@pytest.mark.slow
def test_a_streamed_dense_model_verifies_four_tokens_in_the_time_of_one() -> None:
    made = planned(llama_profile(hidden_size=256, intermediate_size=1024, num_hidden_layers=8), share=3)
    assert made.streamed
    assert made.prediction is not None
    assert passes(made).pass_seconds(1) == pytest.approx(made.prediction.token)
    assert passes(made).pass_seconds(5) < 1.05 * made.prediction.token
    assert passes(made).count(1) == 4


@pytest.mark.slow
def test_a_streamed_mixture_fetches_the_experts_of_each_token() -> None:
    made = planned(mixture())
    assert made.prediction is not None
    assert passes(made).pass_seconds(1) == pytest.approx(made.prediction.token)
    assert passes(made).pass_seconds(5) > 2.5 * made.prediction.token
    assert passes(made).count(1) == 0
    assert "speculation is off" in str(made)


@pytest.mark.slow
def test_a_batch_that_chooses_most_experts_anyway_gains() -> None:
    found = passes(planned(mixture(batch_size=16), share=2))
    assert found.count(1) == 0
    assert found.count(16) > 0


@pytest.mark.slow
def test_wider_passes_take_longer() -> None:
    for found in (passes(planned(mixture())), passes(planned(llama_profile()))):
        seconds = [second for _, second in found.seconds]
        assert seconds == sorted(seconds)
        assert [number for number, _ in found.seconds] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_no_proposals_are_no_prediction() -> None:
    assert planned(mixture(), draft_tokens=0).speculation is None
    assert planned(llama_profile(context_length=0)).speculation is None


def test_without_a_prediction_the_figures_are_nominal_ones() -> None:
    of = llama_profile()
    made = plan(of, {0: of.weights + of.activations + 2**20, "cpu": "1GB"}, draft_tokens=2)
    assert made.prediction is None
    assert passes(made).count(1) == 2
