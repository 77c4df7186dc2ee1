"""Sounds that are generated from a text by several codebooks: Musicgen and Musicgen Melody."""

from __future__ import annotations

import pytest

from tests.zoo.placements import DTYPES, Subject
from tests.zoo.test_architectures import architectures
from tests.zoo.tiny import tiny

from ...examples import alike

pytestmark = [pytest.mark.usefixtures("accelerators"), pytest.mark.slow]


PLACEMENTS = ("auto", "two accelerators")


@alike(
    ("name", "placements"),
    [("musicgen", PLACEMENTS[:1]), ("musicgen", PLACEMENTS), ("musicgen_melody", PLACEMENTS)],
    first=0,
)
def test_their_generation_is_planned_from_the_text_to_the_sound(name: str, placements: tuple[str, ...]) -> None:
    """One profile and one generation that is not dispatched, for all placements."""
    subject = Subject(tiny(name, architectures()[name], DTYPES["float32"]))
    assert [phase.name for phase in subject.profile.phases] == ["prefill", "decode"]
    assert subject.profile.unknown == ""
    problems = {placement: subject.examine(placement).problems for placement in placements}
    assert not any(problems.values()), problems
