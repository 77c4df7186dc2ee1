"""."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.limits import UNKNOWN_NEW_TOKENS
from bigmodel.plan.memory.assignment import Assignment, host_only
from bigmodel.plan.time.cost import (
    PROMPT_SHARE,
    CostModel,
    Objective,
    StepTime,
    Visit,
    seconds_of_pass,
)
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.machine.machine import DeviceLinks, LinkSpeed

from ...profile.models import tiny_llama
from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")


@cache
def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=4), context_length=32, new_tokens=2, device_type="virtual")


def blocks_at(storage: object, execution: object) -> Assignment:
    """All on the accelerator, but the blocks."""
    units = profile().units
    slot_bytes = max(unit.slot_bytes() for unit in units if unit.is_block)
    where = [(storage, execution) if unit.is_block else (0, 0) for unit in units]
    return Assignment(tuple(h for h, _ in where), tuple(r for _, r in where), 0, 2, slot_bytes)  # type: ignore[arg-type]


SECONDS, FETCHES, ASKED = st.floats(0.01, 5), st.sampled_from([0.0, 1.0, 4.0]), st.sampled_from([0.0, 0.5])

RESIDENT, STREAMED, COMPUTED = (0, 0), ("cpu", 0), ("cpu", "cpu")


def test_the_bottleneck_of_a_pass_is_its_longest_component() -> None:
    assert StepTime(1.0, {0: 0.5, "cpu": 0.2}, {0: 0.4}, disk=0.1).binds == "computing on 0"
    assert StepTime(1.0, {0: 0.3}, {0: 0.35, 1: 0.4}, disk=0.1).binds == "the link to device 1"
    assert StepTime(1.0, {0: 0.3}, {0: 0.4}, disk=0.5).binds == "reading from disk"


@pytest.mark.slow
def test_resident_units_take_only_their_compute_time() -> None:
    cost = CostModel(profile(), machine())
    step = cost.seconds(1, blocks_at(*RESIDENT))
    assert step.seconds == pytest.approx(step.compute[0], rel=0.1)
    assert (step.link, step.disk, set(step.compute)) == (0, 0, {0})


@pytest.mark.slow
def test_a_slow_link_is_the_bottleneck_of_a_step_with_streamed_blocks() -> None:
    cost = CostModel(profile(), machine(link=1e6))
    step, blocks = cost.seconds(1, blocks_at(*STREAMED)), [unit for unit in profile().units if unit.is_block]
    assert step.link == pytest.approx(sum(1e-6 + unit.weights / 1e6 for unit in blocks))
    assert step.binds == "the link to device 0"
    assert step.link <= step.seconds <= step.link + step.compute[0] + 1e-9


@pytest.mark.slow
def test_a_block_on_the_host_transfers_inputs_and_no_weights() -> None:
    cost = CostModel(profile(), machine(link=1e6))
    step = cost.seconds(1, blocks_at(*COMPUTED))
    assert (step.link, step.disk) == (0, 0)
    assert step.seconds > step.compute["cpu"] + step.compute[0]


@pytest.mark.slow
def test_inputs_from_the_host_wait_for_weights_on_the_link() -> None:
    cost, streamed, computed = CostModel(profile(), machine(link=1e6)), blocks_at(*STREAMED), blocks_at(*COMPUTED)
    last = max(index for index, unit in enumerate(profile().units) if unit.is_block)
    mixed = replace(
        streamed,
        execution=tuple((computed if i == last else streamed).execution[i] for i in range(len(streamed.execution))),
    )
    step = cost.seconds(1, mixed)
    # What follows the block on the host begins when the first streamed block is there again, and the link then rests.
    following = sum(cost.units.compute(1, index, 0) for index in range(last + 1, len(profile().units)))
    assert following > 0
    assert step.seconds >= step.link + following


def test_outputs_that_come_from_the_host_wait_for_weights_on_the_link() -> None:
    cost, streamed, units = CostModel(profile(), machine(link=1e6)), blocks_at(*STREAMED), profile().units
    first = next(index for index, unit in enumerate(units) if unit.is_block)
    lookup = next(index for index, unit in enumerate(units) if unit.is_lookup)
    assert lookup < first
    assert lookup in (profile().returning or ())
    resident = replace(streamed, storage=tuple(0 if i == first else key for i, key in enumerate(streamed.storage)))
    on_host = replace(
        resident,
        storage=tuple("cpu" if i == lookup else key for i, key in enumerate(resident.storage)),
        execution=tuple("cpu" if i == lookup else key for i, key in enumerate(resident.execution)),
    )
    # The first streamed block is queued at the end of a pass: what is looked up for the next one comes behind it.
    following = cost.units.compute(1, first, 0)
    step = cost.seconds(1, on_host)
    assert step.seconds >= step.link + following
    assert step.seconds == cost.seconds_alone(1, on_host)
    assert cost.seconds(1, resident).seconds < step.link + following


def test_after_a_pause_the_first_block_has_arrived() -> None:
    cost, streamed, units = CostModel(profile(), machine(link=1e6)), blocks_at(*STREAMED), profile().units
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    fetches = [cost.units.fetch(1, index, STREAMED, 0) for index in blocks]
    assert cost.seconds(1, streamed).seconds >= sum(fetches)
    computing = sum(cost.units.compute(1, index, 0) for index in range(-1, len(units)))
    assert sum(fetches[1:]) < cost.seconds_after_pause(1, streamed) <= sum(fetches[1:]) + computing
    for where in (RESIDENT, COMPUTED):
        assert cost.seconds_after_pause(1, blocks_at(*where)) == pytest.approx(
            cost.seconds(1, blocks_at(*where)).seconds
        )


def test_blocks_that_a_step_computes_on_the_host_are_streamed_in_the_prompt() -> None:
    cost, streamed = CostModel(profile(), machine()), blocks_at(*STREAMED)
    blocks = [index for index, unit in enumerate(profile().units) if unit.is_block]
    both = Assignment(
        streamed.storage,
        streamed.execution,
        0,
        streamed.slots,
        streamed.slot_bytes,
        computed_below=dict.fromkeys(blocks, 9),
    )
    assert cost.seconds(0, both) == cost.seconds(0, streamed)
    assert cost.seconds(1, both) == cost.seconds(1, blocks_at(*COMPUTED))


def in_turns(storage: object) -> Assignment:
    """The blocks streamed to two accelerators in turns, the rest on the first one."""
    found = blocks_at(storage, 0)
    blocks = [index for index, unit in enumerate(profile().units) if unit.is_block]
    others = set(blocks[1::2])
    return replace(found, execution=tuple(1 if index in others else key for index, key in enumerate(found.execution)))


def test_each_link_transfers_what_is_streamed_to_its_device() -> None:
    cost = CostModel(profile(), replace(machine(), links=two_links(1e6, 2e6)))
    one, both = cost.seconds(1, blocks_at(*STREAMED)), cost.seconds(1, in_turns("cpu"))
    assert both.links[0] == pytest.approx(one.links[0] / 2)
    assert both.links[1] == pytest.approx(one.links[0] / 4, rel=1e-3)
    assert both.link == both.links[0]


def test_inputs_of_a_block_on_another_accelerator_cross_its_link() -> None:
    slow = CostModel(profile(), replace(machine(), links=two_links(1e8, 1e4)))
    fast = CostModel(profile(), replace(machine(), links=two_links(1e8, 1e8)))
    found = in_turns("cpu")
    resident = replace(found, storage=found.execution)
    assert slow.seconds(1, resident).seconds > fast.seconds(1, resident).seconds + 1e-3
    assert slow.seconds(1, resident).link == 0


def two_links(first: float, second: float) -> dict[str, DeviceLinks]:
    """Return links of so many bytes per second."""
    speeds = [LinkSpeed(rate, 1e-6) for rate in (first, second)]
    return {f"virtual:{index}": DeviceLinks(each, each, each, each) for index, each in enumerate(speeds)}


def test_weights_on_disk_take_the_time_of_the_disk() -> None:
    of = machine(link=1e9)
    step = CostModel(profile(), of).seconds(1, blocks_at("disk", 0))
    on_disk = sum(unit.weights for unit in profile().units if unit.is_block)
    assert step.disk == pytest.approx(on_disk / of.disk_warm)


def generating(new_tokens: int | None) -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=1), context_length=32, new_tokens=new_tokens)


def weighed(of: Profile, name: str) -> tuple[float, list[float]]:
    """What is made least, and the seconds of each phase."""
    goal = Objective(CostModel(of, machine()), name)
    assignment = host_only(of)
    return goal.seconds(assignment), [step.seconds for step in goal.steps(assignment)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latency", "fit"])
def test_latency_is_the_time_of_a_step_and_the_prompt_only_breaks_ties(name: str) -> None:
    seconds, (prompt, step) = weighed(generating(8), name)
    assert prompt > step
    assert seconds == pytest.approx(step + PROMPT_SHARE * prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("new_tokens", "steps"), [(8, 7), (1, 1), (None, UNKNOWN_NEW_TOKENS)])
def test_throughput_is_the_time_of_the_prompt_and_all_steps(new_tokens: int | None, steps: int) -> None:
    seconds, (prompt, step) = weighed(generating(new_tokens), "throughput")
    assert seconds == pytest.approx(prompt + steps * step)


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_a_model_that_generates_nothing_takes_the_seconds_of_its_forward(name: str) -> None:
    seconds, (forward,) = weighed(profile_model(tiny_llama(), context_length=32, cache=None), name)
    assert seconds == forward


def test_parts_that_are_not_fetched_take_their_compute_time() -> None:
    assert seconds_of_pass([Visit(1.0), Visit(2.0)], slots=2) == 3.0


def test_fetched_parts_stay_resident_if_there_are_enough_slots() -> None:
    assert seconds_of_pass([Visit(1.0, 9.0), Visit(1.0, 9.0)], slots=2) == 2.0


def test_compute_and_link_alternate_with_one_slot() -> None:
    assert seconds_of_pass([Visit(1.0, 3.0)] * 4, slots=1) == 16.0


@pytest.mark.parametrize(("compute", "fetch", "expected"), [(1.0, 3.0, 12.0), (3.0, 1.0, 12.0)])
def test_two_slots_take_the_longer_of_compute_and_link(compute: float, fetch: float, expected: float) -> None:
    assert seconds_of_pass([Visit(compute, fetch)] * 4, slots=2) == pytest.approx(expected)


def test_fetches_overlap_with_parts_between_them_but_not_at_the_end() -> None:
    spread = [Visit(1.0), Visit(1.0, 2.0)] * 4
    tail = [Visit(1.0)] * 4 + [Visit(1.0, 2.0)] * 4
    assert seconds_of_pass(spread, slots=2) == pytest.approx(8.0)
    assert seconds_of_pass(tail, slots=2) > 8.0


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.sampled_from([0.0, 1.0, 4.0])), min_size=1, max_size=10),
    st.integers(1, 3),
)
def test_a_pass_takes_at_least_the_longer_of_compute_and_link_and_at_most_their_sum(
    parts: list[tuple[float, float]], slots: int
) -> None:
    visits = [Visit(*part) for part in parts]
    compute, fetched = sum(v.compute for v in visits), [v.fetch for v in visits if v.fetch]
    link = sum(fetched) if len(fetched) > slots else 0.0
    taken = seconds_of_pass(visits, slots)
    assert max(compute, link) - 1e-9 <= taken <= compute + link + 1e-9


@given(
    st.lists(
        st.builds(Visit, SECONDS, FETCHES, ASKED, ASKED, st.integers(0, 1), st.just(0.5)), min_size=1, max_size=10
    ),
    st.integers(0, 3),
    st.floats(0.5, 1.5),
)
def test_a_pass_that_is_not_simulated_takes_no_less_than_the_bound(
    visits: list[Visit], slots: int, share: float
) -> None:
    taken = seconds_of_pass(visits, slots)
    below = share * taken
    found = seconds_of_pass(visits, slots, below)
    if found != pytest.approx(taken):
        assert below * (1 - 1e-12) <= found < taken  # both are sums, in another order


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_transfers_on_demand_add_to_the_time_of_a_part(slots: int) -> None:
    assert seconds_of_pass([Visit(1.0), Visit(1.0, on_demand=2.0)], slots) == 4.0


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_inputs_arrive_before_a_part_computes(slots: int) -> None:
    assert seconds_of_pass([Visit(1.0), Visit(1.0, inputs=0.5)], slots) == 2.5


def test_inputs_wait_for_weights_in_transfer() -> None:
    fetched = [Visit(1.0, 4.0)] * 3
    beside = [*fetched, Visit(1.0), Visit(1.0)]  # the first part comes while these compute
    behind = [*fetched, Visit(1.0), Visit(1.0, inputs=0.5)]
    assert seconds_of_pass(beside, slots=2) == pytest.approx(3 * 4.0)
    # All three are fetched, the inputs come then, and one part computes with the link idle before the next is wanted.
    assert seconds_of_pass(behind, slots=2) == pytest.approx(3 * 4.0 + 0.5 + 1.0)


def test_two_links_fetch_at_once() -> None:
    in_turns = [Visit(0.1, 1.0, device=turn % 2) for turn in range(6)]
    assert seconds_of_pass(in_turns, slots=2) == pytest.approx(3.0, rel=0.01)
    assert seconds_of_pass([visit._replace(device=0) for visit in in_turns], slots=2) == pytest.approx(6.0)


def test_each_device_has_its_own_slots() -> None:
    alternating = [Visit(1.0, 9.0, device=turn % 2) for turn in range(4)]
    assert seconds_of_pass(alternating, slots=2) == 4.0, "two stay on each device"
    assert seconds_of_pass(alternating, slots=1) == 4.0 + 4 * 9.0


def test_several_links_share_the_disk() -> None:
    alternating = [Visit(0.1, 2.0, device=turn % 2, read=2.0) for turn in range(6)]
    assert seconds_of_pass(alternating, slots=2) == pytest.approx(6 * 2.0)


def test_a_fetch_that_hides_behind_other_devices_takes_no_time() -> None:
    visits = [Visit(2.0, 1.0), Visit(2.0, 3.0, device=1)] * 3
    assert seconds_of_pass(visits, slots=2) == pytest.approx(12.0)


def long_run(visits: list[Visit], slots: int, passes: int = 60) -> float:
    """The slow, obvious twin: the mean seconds of many passes, in which a device's next fetch begins when its last
    fetched block is entered."""
    counts = Counter(visit.device for visit in visits)
    entered = dict.fromkeys(counts, 0.0)
    now = half = 0.0
    for turn in range(passes):
        half = now if turn == passes // 2 else half
        for visit in visits:
            if counts[visit.device] > slots:
                now = entered[visit.device] = max(now, entered[visit.device] + visit.fetch)
            now += visit.compute
    return (now - half) / (passes - passes // 2)


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.1, 5), st.integers(0, 2)), min_size=1, max_size=12))
def test_passes_over_several_links_take_what_many_of_them_take_in_the_mean(
    parts: list[tuple[float, float, int]],
) -> None:
    visits = [Visit(compute, fetch, device=device) for compute, fetch, device in parts]
    found, expected = seconds_of_pass(visits, slots=2), long_run(visits, slots=2)
    assert found == pytest.approx(expected, rel=0.1)
    assert found >= sum(visit.compute for visit in visits) - 1e-9


def test_transfers_on_demand_wait_for_transfers_in_progress() -> None:
    asking = [Visit(1.0, 4.0), Visit(1.0, on_demand=2.0), Visit(1.0, 4.0), Visit(1.0, 4.0)]
    silent = [Visit(visit.compute, visit.fetch) for visit in asking]
    assert seconds_of_pass(silent, slots=2) == pytest.approx(3 * 4.0)
    # The link brings three parts and what is asked for, and has nothing to bring while the one that asked computes.
    assert seconds_of_pass(asking, slots=2) == pytest.approx(3 * 4.0 + 2.0 + 1.0)
