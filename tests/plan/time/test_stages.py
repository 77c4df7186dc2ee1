"""Steps over parts that are resident on several accelerators: seconds on each, by the number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.plan import Plan, plan

from ..machines import llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")


def planned(accelerators: int = 2, share: float = 0.75, link: float = 1e8) -> Plan:
    of = llama_profile(hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    size = int(share * of.weights) + of.activations + 2**22
    budget: dict[Any, Any] = {**dict.fromkeys(range(accelerators), size), "cpu": "1GB"}
    return plan(of, budget, "balanced", machine=machine(link, accelerator=1e-11))


@pytest.mark.slow
def test_a_resident_model_has_the_seconds_of_each_device() -> None:
    made = planned(link=1e13)
    assert not made.streamed
    assert made.stages is not None
    assert made.prediction is not None
    assert set(made.stages.devices) == {part.runs_on for part in made.parts} == {0, 1}
    # The rest are copies between the devices.
    assert 0.7 * made.prediction.token < sum(made.stages.step_seconds(1)) <= made.prediction.token
    assert made.stages.launch > 0


def test_steps_of_more_tokens_take_longer() -> None:
    stages = planned().stages
    assert stages is not None
    for one, other in zip(stages.step_seconds(1), stages.step_seconds(1024), strict=True):
        assert one < other


def test_other_plans_have_none() -> None:
    assert planned(1, 1.0).stages is None
    streamed = planned(2, 0.2)
    assert streamed.streamed
    assert streamed.stages is None
