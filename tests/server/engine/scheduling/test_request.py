"""What a request asks for decides which way its tokens are chosen.

A request is its prompt and its choices, each with random numbers of its own.

An engine tells its observer of every request and of every token, in the order in which they come.
"""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.engine import Done, EngineOptions, SamplingParams, build_engine
from bigmodel.server.engine.scheduling.request import Observer, SequencePhase
from tests.server.tiny import ask, make_request, tiny_model, tiny_tokenizer


def test_greedy_sampling_is_temperature_zero() -> None:
    assert SamplingParams(1, temperature=0.0).greedy
    assert not SamplingParams(1, temperature=0.1).greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 2.0}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"grammar": object()},
    ],
)
def test_parameters_that_change_the_logits_are_recognised(fields: dict[str, Any]) -> None:
    assert SamplingParams(1, **fields).adjusts_logits


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"logprobs": 5}])
def test_parameters_that_only_choose_tokens_leave_the_logits(fields: dict[str, Any]) -> None:
    assert not SamplingParams(1, **fields).adjusts_logits


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


def test_choices_have_separate_random_streams_that_a_seed_repeats() -> None:
    drawn = [[s.rng.random() for s in make_request([1], n=2, seed=seed).sequences] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert [s.rng.random() for s in make_request([1]).sequences] != [
        s.rng.random() for s in make_request([1]).sequences
    ]


def test_a_request_is_finished_when_every_choice_is() -> None:
    request = make_request([1], n=2)
    first, second = request.sequences
    first.phase, first.output = SequencePhase.FINISHED, [1, 2]
    second.output = [3]
    assert not request.finished
    second.phase = SequencePhase.FINISHED
    assert request.finished
    assert request.completion_tokens == 3


class Listener(Observer):
    """Records the events that it gets."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Observer, name):
            return super().__getattribute__(name)
        return lambda *told: self.heard.append((name, told))

    def told(self, name: str) -> list[tuple[Any, ...]]:
        return [told for heard, told in self.heard if heard == name]


def test_listeners_are_notified_from_start_to_end_of_a_request() -> None:
    listener = Listener()
    engine = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=2**20), observer=listener)
    engine.start()
    try:
        ask(engine, [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True).wait()
    finally:
        engine.stop()
    names = [name for name, _ in listener.heard]
    assert names.index("started") < names.index("first_token") < names.index("next_token") < names.index("finished")
    assert (names.count("started"), names.count("first_token"), names.count("next_token")) == (1, 1, 2)
    assert sum(prompt for prompt, _ in listener.told("tokens")) == 5
    assert sum(generated for _, generated in listener.told("tokens")) == 3
    ((request, outcome, seconds),) = listener.told("finished")
    assert (request.prompt, outcome) == ([1, 2, 3, 4, 5], "ok")
    assert seconds > 0
    assert all(sequences == 1 for _, sequences in listener.told("step"))


def test_listeners_are_optional() -> None:
    engine = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=2**20))
    engine.start()
    try:
        assert isinstance(ask(engine, [1, 2], max_tokens=2, ignore_eos=True).wait(), Done)
    finally:
        engine.stop()
