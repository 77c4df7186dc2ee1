"""The scheduler in a simulated engine: memory is never exceeded, no sequence starves, order is kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, TokenPool, round_up
from bigmodel.server.engine.kv.prefix import PrefixCache
from bigmodel.server.engine.scheduling.request import Request, Sequence, SequencePhase
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from tests.server.tiny import make_request

B = PROMPT_BLOCK


def scheduler(capacity: int = 100 * B, *, sequences: int = 4, tokens: int = 4 + 2 * B) -> Scheduler:
    pool = TokenPool(capacity)
    return Scheduler(pool, PrefixCache(pool, enabled=False), max_sequences=sequences, max_batch_tokens=tokens)


def request(prompt: int, output: int, n: int = 1) -> Request:
    return make_request([1] * prompt, max_tokens=output, n=n)


def compute(scheduler: Scheduler, batch: list[ScheduledTokens]) -> list[Sequence]:
    """Account for a step as the engine does, without a model; returns the sequences that finished."""
    finished = []
    for scheduled in batch:
        sequence = scheduled.sequence
        samples = scheduled.samples
        sequence.computed += scheduled.tokens
        if samples:
            sequence.output.append(1)
            if len(sequence.output) == sequence.params.max_tokens:
                scheduler.finish(sequence)
                finished.append(sequence)
    return finished


def test_prompts_are_cut_on_block_borders_under_the_budget() -> None:
    s = scheduler()
    s.add(request(5 * B + 7, 3).sequences[0])
    sizes = []
    while s.waiting or s.running:
        batch = s.schedule()
        sizes.append(batch[0].tokens)
        compute(s, batch)
    assert sizes == [2 * B, 2 * B, B + 7, 1, 1]


def test_a_sequence_joins_while_others_decode_and_leaves_when_done() -> None:
    s = scheduler()
    first = request(10, 5).sequences[0]
    s.add(first)
    compute(s, s.schedule())
    second = request(20, 2).sequences[0]
    s.add(second)
    batch = s.schedule()
    assert [(g.sequence, g.tokens) for g in batch] == [(first, 1), (second, 20)]
    compute(s, batch)
    compute(s, s.schedule())
    assert second.phase is SequencePhase.FINISHED
    assert [g.sequence for g in s.schedule()] == [first]


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    s = scheduler()
    first, long = request(4, 50).sequences[0], request(20 * B, 1).sequences[0]
    s.add(first)
    compute(s, s.schedule())
    s.add(long)
    while long.phase is not SequencePhase.FINISHED:
        before = len(first.output)
        compute(s, s.schedule())
        assert len(first.output) == before + 1


def test_the_youngest_sequence_is_preempted_when_memory_runs_out() -> None:
    s = scheduler(2 * B)
    old, young = request(B - 2, 10).sequences[0], request(10, 30).sequences[0]
    s.add(old)
    s.add(young)
    compute(s, s.schedule())
    assert s.running == [old, young]
    while old.phase is SequencePhase.RUNNING:
        compute(s, s.schedule())
    assert s.preemptions == 1
    assert young.preemptions == 1
    while young.phase is not SequencePhase.FINISHED:
        compute(s, s.schedule())
    assert s.pool.used == 0


def test_finishing_a_sequence_frees_its_memory_at_once() -> None:
    s = scheduler()
    running, waiting = request(10, 5).sequences[0], request(10, 5).sequences[0]
    s.add(running)
    compute(s, s.schedule())
    s.add(waiting)
    s.finish(running)
    s.finish(waiting)
    assert (s.running, list(s.waiting), s.pool.used) == ([], [], 0)


def test_sequences_of_a_request_wait_for_the_first_to_compute_the_shared_prompt() -> None:
    pool = TokenPool(100 * B)
    s = Scheduler(pool, PrefixCache(pool), max_sequences=4, max_batch_tokens=4 + 4 * B)
    both = request(3 * B + 1, 4, n=2)
    for sequence in both.sequences:
        s.add(sequence)
    assert [g.sequence.index for g in s.schedule()] == [0]


def test_all_logits_are_needed_for_log_probabilities_of_a_prompt_only() -> None:
    (scored,), (plain,) = make_request([1], prompt_logprobs=True).sequences, make_request([1]).sequences
    assert ScheduledTokens(scored, 1).all_logits
    assert not ScheduledTokens(plain, 1).all_logits
    scored.output = [2]
    assert not ScheduledTokens(scored, 1).all_logits


def test_a_budget_that_could_starve_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens=100"):
        scheduler(tokens=100)


jobs = st.lists(st.tuples(st.integers(1, 4 * B), st.integers(1, 2 * B)), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(jobs, st.integers(1, 5), st.integers(0, 3), st.integers(0, 6))
def test_all_sequences_finish_within_memory_in_order_of_arrival(
    sizes: list[tuple[int, int]], slots: int, spare: int, gap: int
) -> None:
    need = max(round_up(prompt + output) for prompt, output in sizes)
    s = scheduler(need + spare * B, sequences=slots, tokens=slots + 2 * B)
    queue = [request(*size).sequences[0] for size in sizes]
    first_run: list[int] = []
    finished: list[Sequence] = []
    step = 0
    while len(finished) < len(queue):
        while len(s.waiting) + len(s.running) + len(finished) < len(queue) and step >= gap * (
            len(s.waiting) + len(s.running) + len(finished)
        ):
            s.add(queue[len(s.waiting) + len(s.running) + len(finished)])
        if s.waiting or s.running:
            batch = s.schedule()
            assert batch, "nothing was scheduled"
            assert sum(g.tokens for g in batch) <= s.max_batch_tokens
            assert len(s.running) <= slots
            assert s.pool.used == sum(q.kv.capacity for q in s.running if q.kv) <= s.pool.capacity
            assert s.running[0].order == min(q.order for q in [*s.running, *s.waiting])
            first_run += [g.sequence.order for g in batch if g.sequence.order not in first_run]
            finished += compute(s, batch)
        step += 1
        assert step < 20000
    assert first_run == sorted(first_run)
    assert s.pool.used == 0


def asked(client: str, priority: int = 0) -> Request:
    made = request(5, 1)
    made.client, made.priority = client, priority
    return made


def order_of_starts(requests: list[Request], sequences: int = 1) -> list[int]:
    """Indices of requests in the order in which they begin."""
    s = scheduler(sequences=sequences)
    for each in requests:
        s.add(each.sequences[0])
    found: list[int] = []
    while s.waiting or s.running:
        batch = s.schedule()
        found += [requests.index(scheduled.sequence.request) for scheduled in batch]
        compute(s, batch)
    return found


def test_clients_take_turns_however_many_requests_one_has_waiting() -> None:
    asked_by = [asked("a") for _ in range(4)] + [asked("b"), asked("c"), asked("b")]
    assert order_of_starts(asked_by) == [0, 4, 5, 1, 6, 2, 3]


def test_requests_without_a_client_come_in_their_order() -> None:
    assert order_of_starts([asked("") for _ in range(4)]) == [0, 1, 2, 3]


def test_requests_without_a_client_come_behind_those_of_clients() -> None:
    assert order_of_starts([asked(""), asked(""), asked("a"), asked("b"), asked("a")]) == [2, 3, 4, 0, 1]


def test_of_one_clients_requests_the_lowest_priority_is_first() -> None:
    assert order_of_starts([asked("", 5), asked("", 0), asked("", -1), asked("", 0)]) == [2, 1, 3, 0]
    assert order_of_starts([asked("a", 5), asked("b", 9), asked("a", -5)]) == [2, 1, 0]


def test_turns_of_clients_that_are_gone_are_forgotten() -> None:
    s = scheduler(sequences=1)
    for number in range(50):
        s.add(asked(f"client {number}").sequences[0])
        compute(s, s.schedule())
    assert len(s._turns) <= 2
