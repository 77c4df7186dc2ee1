from __future__ import annotations

import dataclasses

from bigmodel.plan import Prediction

from .test_plan import PLAN


def test_every_part_and_device_has_its_sentence() -> None:
    lines = PLAN.explain().splitlines()
    assert "layers.2: streamed from RAM." in lines
    assert any(line.startswith("Device 0 holds 10 B weights") and "31 B of its budget" in line for line in lines)


def test_the_time_and_what_more_memory_would_buy() -> None:
    timed = dataclasses.replace(PLAN, prediction=Prediction(None, 0.5, "the link to 0", {0: 0.125}))
    assert "A step takes 0.5 s, bound by the link to 0." in timed.explain()
    assert "One more GiB on device 0 would take 0.125 s off a step." in timed.explain()
