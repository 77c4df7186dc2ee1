from __future__ import annotations

from bigmodel.plan.memory.assignment import Assignment, host_only
from bigmodel.profile import profile_model

from ...profile.models import Stack


def test_what_is_held_elsewhere_than_on_the_accelerator_it_runs_on_is_streamed() -> None:
    assignment = Assignment(storage=("cpu", 0, "cpu", "disk"), execution=(0, 0, "cpu", 0), main=0)
    assert [assignment.streamed(index) for index in range(4)] == [True, False, False, True]


def test_in_steps_what_is_computed_with_few_tokens_runs_on_the_host() -> None:
    assignment = Assignment(storage=("cpu", "cpu"), execution=(0, 0), main=0, computed_below={1: 9})
    assert assignment.in_steps().execution == (0, "cpu")
    assert assignment.in_steps().in_steps() == assignment.in_steps()


def test_the_host_alone_holds_and_runs_everything() -> None:
    profile = profile_model(Stack())
    assignment = host_only(profile)
    assert set(assignment.storage) == set(assignment.execution) == {"cpu"}
    assert len(assignment.storage) == len(profile.units)
