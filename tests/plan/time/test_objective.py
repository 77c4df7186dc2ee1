from __future__ import annotations

import pytest

from bigmodel.plan.memory.assignment import host_only
from bigmodel.plan.time.cost import CostModel
from bigmodel.plan.time.objective import PROMPT_SHARE, UNKNOWN_NEW_TOKENS, Objective
from bigmodel.profile import Profile, profile_model

from ...profile.models import tiny_llama
from ..machines import machine


def profile(new_tokens: int | None) -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=1), context_length=32, new_tokens=new_tokens)


def weighed(of: Profile, name: str) -> tuple[float, list[float]]:
    """What is made least, and the seconds of each phase."""
    goal = Objective(CostModel(of, machine()), name)
    assignment = host_only(of)
    return goal.seconds(assignment), [step.seconds for step in goal.steps(assignment)]


@pytest.mark.parametrize("name", ["latency", "fit"])
def test_latency_is_a_step_and_the_prompt_no_more_than_breaks_ties(name: str) -> None:
    seconds, (prompt, step) = weighed(profile(8), name)
    assert prompt > step
    assert seconds == pytest.approx(step + PROMPT_SHARE * prompt)


@pytest.mark.parametrize(("new_tokens", "steps"), [(8, 7), (1, 1), (None, UNKNOWN_NEW_TOKENS)])
def test_throughput_is_the_prompt_and_every_step_after_it(new_tokens: int | None, steps: int) -> None:
    seconds, (prompt, step) = weighed(profile(new_tokens), "throughput")
    assert seconds == pytest.approx(prompt + steps * step)


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_a_model_that_generates_nothing_takes_the_seconds_of_its_forward(name: str) -> None:
    seconds, (forward,) = weighed(profile_model(tiny_llama(), context_length=32, cache=None), name)
    assert seconds == forward
