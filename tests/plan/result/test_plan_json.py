from __future__ import annotations

import dataclasses
import json

import pytest

from bigmodel.errors import PlanError
from bigmodel.plan import Plan, Prediction

from .test_plan import PLAN


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    timed = dataclasses.replace(PLAN, prediction=Prediction(1.5, 0.25, "link to 0", {0: 0.1, "cpu": 0.0}))
    assert Plan.from_json(timed.to_json(indent=None)) == timed


def test_device_numbers_stay_numbers() -> None:
    assert list(Plan.from_json(PLAN.to_json()).devices) == [0, "cpu", "disk"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", '{"format": 99}',
        json.dumps({**json.loads(PLAN.to_json()), "parts": [{"name": 3}]}),
        json.dumps({**json.loads(PLAN.to_json()), "devices": None}),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)
