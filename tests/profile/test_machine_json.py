from __future__ import annotations

import json

import pytest

from bigmodel.errors import PlanError
from bigmodel.profile import machine_json
from bigmodel.profile.nominal import nominal_machine

MACHINE = nominal_machine()


def test_a_profile_survives_json() -> None:
    assert machine_json.load(machine_json.dump(MACHINE)) == MACHINE


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "null", '{"format": 2, "machine": {"name": 3}}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a machine profile"):
        machine_json.load(text)


def test_another_format_is_refused_with_its_number() -> None:
    content = {**json.loads(machine_json.dump(MACHINE)), "format": 9}
    with pytest.raises(PlanError, match=f"format 9; this version reads {machine_json.FORMAT}"):
        machine_json.load(json.dumps(content))


def test_a_curve_without_points_is_refused() -> None:
    content = json.loads(machine_json.dump(MACHINE))
    content["machine"]["devices"]["cpu"]["curves"]["move"] = {"sizes": "many", "values": [1.0]}
    with pytest.raises(PlanError, match="not a machine profile"):
        machine_json.load(json.dumps(content))
