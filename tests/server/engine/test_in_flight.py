"""How many steps are in flight, and what is kept of one."""

from __future__ import annotations

from typing import Any

from bigmodel.server.engine.in_flight import InFlight, LaunchedStep
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from tests.server.tiny import make_request


def test_no_more_steps_are_in_flight_than_are_worth_it() -> None:
    pipeline: Any = None
    found = InFlight(pipeline, 3, lambda tokens: tokens // 10)
    assert [found.steps(tokens) for tokens in (1, 10, 29, 100)] == [1, 1, 2, 3]


def test_a_step_computes_the_tokens_of_all_its_sequences() -> None:
    (one,), (other,) = make_request([1, 2, 3]).sequences, make_request([1]).sequences
    batch = [ScheduledTokens(one, 3), ScheduledTokens(other, 1, draft=(4, 5))]
    assert LaunchedStep(batch, 0.0).tokens == 6
