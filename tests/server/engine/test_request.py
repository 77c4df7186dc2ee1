"""A request is its prompt and its choices, each with random numbers of its own."""

from __future__ import annotations

from bigmodel.server.engine.request import Phase
from tests.server.tiny import make_request


def test_tokens_are_those_of_the_prompt_and_then_the_output() -> None:
    (sequence,) = make_request([1, 2, 3]).sequences
    sequence.output = [4, 5]
    everything = [1, 2, 3, 4, 5]
    assert len(sequence) == 5
    for start in range(6):
        for end in range(start, 6):
            assert sequence.token_slice(start, end) == everything[start:end]


def test_a_sequence_decodes_when_only_its_last_token_is_left_to_compute() -> None:
    (sequence,) = make_request([1, 2]).sequences
    assert (sequence.remaining, sequence.decoding) == (2, False)
    sequence.computed = 1
    assert (sequence.remaining, sequence.decoding) == (1, False)  # of the prompt
    sequence.computed, sequence.output = 2, [7]
    assert (sequence.remaining, sequence.decoding) == (1, True)


def test_choices_draw_numbers_of_their_own_that_a_seed_repeats() -> None:
    drawn = [[s.rng.random() for s in make_request([1], n=2, seed=seed).sequences] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert [s.rng.random() for s in make_request([1]).sequences] != [
        s.rng.random() for s in make_request([1]).sequences
    ]


def test_a_request_is_finished_when_every_choice_is() -> None:
    request = make_request([1], n=2)
    first, second = request.sequences
    first.phase, first.output = Phase.FINISHED, [1, 2]
    second.output = [3]
    assert not request.finished
    second.phase = Phase.FINISHED
    assert request.finished
    assert request.completion_tokens == 3
