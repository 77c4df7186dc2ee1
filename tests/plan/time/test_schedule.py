from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan.time.schedule import Visit, seconds_of_pass


def test_what_is_not_fetched_takes_what_it_computes() -> None:
    assert seconds_of_pass([Visit(1.0), Visit(2.0)], slots=2) == 3.0


def test_no_more_fetched_parts_than_slots_stay_where_they_are() -> None:
    assert seconds_of_pass([Visit(1.0, 9.0), Visit(1.0, 9.0)], slots=2) == 2.0


def test_with_one_slot_compute_and_link_take_turns() -> None:
    assert seconds_of_pass([Visit(1.0, 3.0)] * 4, slots=1) == 16.0


@pytest.mark.parametrize(("compute", "fetch", "expected"), [(1.0, 3.0, 12.0), (3.0, 1.0, 12.0)])
def test_with_two_slots_the_longer_of_both_counts(compute: float, fetch: float, expected: float) -> None:
    assert seconds_of_pass([Visit(compute, fetch)] * 4, slots=2) == pytest.approx(expected)


def test_fetched_parts_between_others_are_hidden_where_a_tail_of_them_is_not() -> None:
    spread = [Visit(1.0), Visit(1.0, 2.0)] * 4
    tail = [Visit(1.0)] * 4 + [Visit(1.0, 2.0)] * 4
    assert seconds_of_pass(spread, slots=2) == pytest.approx(8.0)
    assert seconds_of_pass(tail, slots=2) > 8.0


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.sampled_from([0.0, 1.0, 4.0])), min_size=1, max_size=10),
    st.integers(1, 3),
)
def test_a_pass_takes_at_least_its_compute_and_its_link_and_at_most_both(
    parts: list[tuple[float, float]], slots: int
) -> None:
    visits = [Visit(*part) for part in parts]
    compute, fetched = sum(v.compute for v in visits), [v.fetch for v in visits if v.fetch]
    link = sum(fetched) if len(fetched) > slots else 0.0
    taken = seconds_of_pass(visits, slots)
    assert max(compute, link) - 1e-9 <= taken <= compute + link + 1e-9


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_what_a_part_asks_for_while_it_runs_is_waited_for(slots: int) -> None:
    assert seconds_of_pass([Visit(1.0), Visit(1.0, on_demand=2.0)], slots) == 4.0


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_inputs_come_before_a_part_computes(slots: int) -> None:
    assert seconds_of_pass([Visit(1.0), Visit(1.0, inputs=0.5)], slots) == 2.5


def test_inputs_wait_behind_the_weights_that_are_on_their_way() -> None:
    fetched = [Visit(1.0, 4.0)] * 3
    beside = [*fetched, Visit(1.0), Visit(1.0)]  # the first part comes while these compute
    behind = [*fetched, Visit(1.0), Visit(1.0, inputs=0.5)]
    assert seconds_of_pass(beside, slots=2) == pytest.approx(3 * 4.0)
    # All three are fetched, the inputs come then, and one part computes with the link idle before the next is wanted.
    assert seconds_of_pass(behind, slots=2) == pytest.approx(3 * 4.0 + 0.5 + 1.0)


def test_what_is_asked_for_waits_behind_what_the_link_already_brings() -> None:
    asking = [Visit(1.0, 4.0), Visit(1.0, on_demand=2.0), Visit(1.0, 4.0), Visit(1.0, 4.0)]
    silent = [Visit(visit.compute, visit.fetch) for visit in asking]
    assert seconds_of_pass(silent, slots=2) == pytest.approx(3 * 4.0)
    # The link brings three parts and what is asked for, and has nothing to bring while the one that asked computes.
    assert seconds_of_pass(asking, slots=2) == pytest.approx(3 * 4.0 + 2.0 + 1.0)
