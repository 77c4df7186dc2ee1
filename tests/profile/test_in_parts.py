from __future__ import annotations

import pytest

from bigmodel.profile.events import Route
from bigmodel.profile.experts import Choice
from bigmodel.profile.in_parts import ALL_AT_ONCE, in_parts

CHOICE = Choice(tokens=10, per_token=2, count=4)


@pytest.mark.parametrize("slots", [4, 9])
def test_experts_that_all_fit_are_computed_with_at_once(slots: int) -> None:
    assert in_parts(Route(0, CHOICE, nbytes=100), slots) == ALL_AT_ONCE
    assert ALL_AT_ONCE.bytes_of(400) == 400


def test_half_of_the_slots_compute_while_the_others_are_filled() -> None:
    part = in_parts(Route(0, CHOICE, nbytes=100), slots=2)
    assert part.share == pytest.approx(1 / CHOICE.wanted)
    assert part.beside == int(200 * (1 + part.share))


def test_what_is_made_of_the_tokens_themselves_is_made_whole() -> None:
    part = in_parts(Route(0, CHOICE, nbytes=100), slots=2)
    assert (part.bytes_of(400), part.bytes_of(100)) == (int(400 * part.share), 100)
