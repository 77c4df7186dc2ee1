"""Several steps in flight share what one step would compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, TokenPool
from bigmodel.server.engine.kv.prefix import PrefixCache
from bigmodel.server.engine.scheduling.request import Sequence, SequencePhase
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from bigmodel.server.engine.scheduling.step_limits import StepLimits, limits_of_step
from tests.server.tiny import make_request

B = PROMPT_BLOCK


def test_sequences_are_divided_evenly() -> None:
    sizes: list[int] = []
    for left in (5, 4, 3, 2, 1):
        sizes.append(limits_of_step(24 - sum(sizes), sum(sizes), 10 * B, 5, left).sequences)
    assert sizes == [5, 5, 5, 5, 4]


def test_a_step_that_has_grown_large_leaves_some_to_the_next_one() -> None:
    assert limits_of_step(3, 5, 512, 4, 1).sequences == 2  # 1, 2 and 2 are in flight
    assert limits_of_step(2, 6, 512, 4, 1).sequences == 2


def test_a_single_step_takes_everything() -> None:
    assert limits_of_step(7, 0, 512, 1, 1) == StepLimits(7, 512)


def test_a_prompt_has_a_whole_block_where_there_is_one() -> None:
    assert limits_of_step(8, 0, 512, 4, 4) == StepLimits(2, 2 + B)
    assert limits_of_step(8, 0, 100, 4, 4) == StepLimits(2, 100)


def scheduler(capacity: int = 100 * B, *, sequences: int = 4, tokens: int = 4 + 2 * B) -> Scheduler:
    pool = TokenPool(capacity)
    return Scheduler(pool, PrefixCache(pool, enabled=False), max_sequences=sequences, max_batch_tokens=tokens)


def sequence(prompt: int, output: int) -> Sequence:
    (made,) = make_request([1] * prompt, max_tokens=output).sequences
    return made


def launch(s: Scheduler, limits: StepLimits | None = None) -> list[ScheduledTokens]:
    batch = s.schedule(limits)
    for scheduled in batch:
        scheduled.sequence.in_flight = True
    return batch


def land(s: Scheduler, batch: list[ScheduledTokens]) -> None:
    """Account for a step as the engine does, without a model."""
    for scheduled in batch:
        held = scheduled.sequence
        s.landed(held)
        if held.phase is not SequencePhase.RUNNING:
            continue
        samples = scheduled.samples
        held.computed += scheduled.tokens
        if samples:
            held.output.append(1)
            if len(held.output) == held.params.max_tokens:
                s.finish(held)


def test_what_is_in_flight_is_in_no_other_step() -> None:
    s = scheduler()
    held = [sequence(3, 4) for _ in range(4)]
    for each in held:
        s.add(each)
    first, second = launch(s, StepLimits(2, 300)), launch(s, StepLimits(2, 300))
    assert [scheduled.sequence for scheduled in (*first, *second)] == held
    assert s.schedule() == []
    land(s, first)
    assert [scheduled.sequence for scheduled in s.schedule()] == held[:2]


def test_a_sequence_in_flight_keeps_its_memory_when_it_is_finished() -> None:
    s = scheduler()
    held = sequence(3, 4)
    s.add(held)
    batch = launch(s)
    s.finish(held)
    assert s.pool.used == B
    land(s, batch)
    assert s.pool.used == 0
    assert held.phase is SequencePhase.FINISHED


def test_a_sequence_in_flight_is_not_preempted() -> None:
    s = scheduler(2 * B)
    old, young = sequence(B - 1, 4), sequence(B - 1, 4)
    s.add(old)
    land(s, launch(s))
    s.add(young)
    land(s, launch(s, StepLimits(4, 300)))
    for each in (old, young):
        each.output += [1] * (B - len(each))
    old.computed, young.computed = len(old) - 1, len(young) - 1
    old.output.append(1)  # needs another block
    old.computed += 1
    young.in_flight = True
    assert s.schedule() == []
    assert old.phase is young.phase is SequencePhase.RUNNING
    s.landed(young)
    assert [scheduled.sequence for scheduled in s.schedule()] == [old]
    assert young.preemptions == 1


@given(
    st.lists(st.tuples(st.integers(1, 3 * B), st.integers(1, 5)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(4, 12),
)
def test_all_steps_together_compute_no_more_than_one_and_all_texts_end(
    asked: list[tuple[int, int]], steps: int, blocks: int
) -> None:
    s = scheduler(blocks * B)
    held = [sequence(*each) for each in asked]
    for each in held:
        s.add(each)
    flying: list[list[ScheduledTokens]] = []
    while s.waiting or s.running:
        tokens = sum(scheduled.tokens for batch in flying for scheduled in batch)
        batch: list[ScheduledTokens] = []
        if len(flying) < steps:
            computed = sum(map(len, flying))
            left = steps - len(flying)
            batch = launch(s, limits_of_step(s.ready, computed, s.max_batch_tokens - tokens, steps, left))
        if batch:
            flying.append(batch)
            assert tokens + sum(scheduled.tokens for scheduled in batch) <= s.max_batch_tokens
        else:
            assert flying, "nothing can go on"
        if len(flying) == steps or not batch:
            land(s, flying.pop(0))
    for batch in flying:
        land(s, batch)
    assert all(len(each.output) == output for each, (_, output) in zip(held, asked, strict=True))
    assert s.pool.used == 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_at_hand_are_those_of_a_step_at_most(sequences: int) -> None:
    s = scheduler(sequences=sequences)
    for _ in range(3):
        s.add(sequence(2 * B, 1))
    assert s.tokens_at_hand == min(sequences * 2 * B, s.max_batch_tokens)
    assert s.ready == sequences
