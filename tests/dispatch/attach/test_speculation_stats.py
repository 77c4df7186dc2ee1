"""`dispatch_stats` has what the plan says of proposed tokens, where it says anything."""

from __future__ import annotations

import pytest

from bigmodel import dispatch_model, make_plan
from tests.server.tiny import tiny_model


@pytest.mark.slow
def test_the_counters_have_the_plans_figures() -> None:
    model = tiny_model()
    made = make_plan(model, {"cpu": "1GB"}, context_length=16, draft_tokens=3)
    assert made.speculation is not None
    stats = dispatch_model(model, made).dispatch_stats()  # type: ignore[operator]
    assert stats["speculation"] == {"most": 3, "tokens": 3, "gain": made.speculation.gain(3)}


def test_there_are_none_without_proposals() -> None:
    model = tiny_model()
    dispatched = dispatch_model(model, make_plan(model, {"cpu": "1GB"}, context_length=16))
    assert "speculation" not in dispatched.dispatch_stats()  # type: ignore[operator]
