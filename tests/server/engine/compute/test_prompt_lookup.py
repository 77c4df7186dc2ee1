"""Prompt lookup: what is proposed, and that no token changes by it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from bigmodel.server.engine.compute.prompt_lookup import LENGTHS, MOST_PAUSE, PromptLookup
from bigmodel.server.engine.scheduling.request import Request, SamplingParams
from tests.examples import alike
from tests.server.engine.test_engine import flat, prompts
from tests.server.tiny import ask, tiny_model, tiny_tokenizer

COUNT = 4


class Nothing:
    """A sink that keeps nothing."""

    def put(self, event: Any, /) -> None: ...


def sequence(prompt: list[int], max_tokens: int = 1000) -> Any:
    return Request("r", prompt, SamplingParams(max_tokens), Nothing()).sequences[0]


def proposals(text: list[int], count: int = COUNT, max_tokens: int = 1000) -> list[int]:
    found = sequence(text, max_tokens)
    PromptLookup(count).propose([found])
    return list(found.draft)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], [9, 8, 7, 6]),
        ([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], [5, 0, 1, 2]),
        ([7, 2, 3, 4, 0, 9, 2, 3], [4, 0, 9, 2]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4, 5], []),
        ([1], []),
    ],
    ids=["three tokens", "the latest place", "two tokens", "a loop goes on", "one token in a loop", "nothing", "short"],
)
def test_what_followed_the_last_tokens_before_is_proposed(text: list[int], expected: list[int]) -> None:
    assert proposals(text) == expected


def slow_proposals(text: list[int]) -> list[int]:
    """The slow twin: each earlier place of the last tokens, from the end."""
    for length in LENGTHS:
        for place in range(len(text) - length - 1, -1, -1):
            if text[place : place + length] == text[-length:]:
                grown = list(text)
                for _ in range(COUNT):
                    grown.append(grown[place + length + len(grown) - len(text)])
                return grown[len(text) :]
    return []


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257]), min_size=1, max_size=40))
def test_places_between_two_tokens_are_no_places(text: list[int]) -> None:
    """Tokens whose bytes look like others' when they are read between two of them."""
    assert proposals(text) == slow_proposals(text)


def test_no_more_is_proposed_than_may_still_be_generated() -> None:
    assert proposals([5, 5, 5], max_tokens=3) == [5, 5]
    assert proposals([5, 5, 5], max_tokens=1) == []


def continued(found: Any, drafter: PromptLookup, tokens: list[int]) -> list[int]:
    found.output.extend(tokens)
    drafter.propose([found])
    return list(found.draft)


def test_fewer_are_proposed_after_a_rejection_and_more_again_after_a_success() -> None:
    found, drafter = sequence([5] * 8), PromptLookup(8)
    assert continued(found, drafter, []) == [5] * 8
    assert continued(found, drafter, [5, 5, 6]) == []
    assert continued(found, drafter, [5, 5]) == [6, 5, 5], "two of eight were right: three are tried"
    assert len(continued(found, drafter, [6, 5, 5, 6])) == 6
    assert len(continued(found, drafter, [5, 5, 6, 5, 5, 6, 5])) == 8


def test_a_text_whose_proposals_are_all_rejected_is_left_alone_for_a_while() -> None:
    found, drafter = sequence([5] * 8, max_tokens=10**6), PromptLookup(2)
    asked = [step for step in range(300) if continued(found, drafter, [1000 + step, 5, 5])]
    assert len(asked) < 15
    assert max(b - a for a, b in itertools.pairwise(asked)) <= MOST_PAUSE + 1


def engine_with(**options: Any) -> Engine:
    engine = build_engine(
        tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=64 << 20, max_sequences=8, **options)
    )
    engine.start()
    return engine


FEW_TOKENS = {"logit_bias": dict.fromkeys((5, 6, 7), 60.0), "ignore_eos": True}
"""Settings by which texts repeat themselves, and not always in the same way."""


@pytest.mark.slow
@alike("temperature", [1.0, 0.0], first=1)
def test_the_bits_are_those_without_it(temperature: float) -> None:
    asked = prompts(5)

    def generated(**options: Any) -> tuple[list[Any], int]:
        engine = engine_with(**options)
        together = [
            ask(engine, p, max_tokens=40, temperature=temperature, seed=i, logprobs=2, **FEW_TOKENS)
            for i, p in enumerate(asked)
        ]
        assert all(isinstance(collector.wait(), Done) for collector in together)
        engine.stop()
        return [flat(collector) for collector in together], engine.core.counts.drafted

    plain, _ = generated()
    looked_up, drafted = generated(prompt_lookup=COUNT)
    assert looked_up == plain
    assert drafted > 20


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    engine = engine_with(prompt_lookup=8)
    ask(engine, "the cat", max_tokens=100, temperature=0, logit_bias={5: 100.0}, ignore_eos=True).wait()
    assert engine.core.counts.accepted > 80
    assert engine.core.steps < 20
    engine.stop()


def test_it_is_refused_beside_a_draft_model() -> None:
    with pytest.raises(ServeError, match="give one of them"):
        build_engine(
            tiny_model(),
            tiny_tokenizer(),
            options=EngineOptions(prompt_lookup=2, kv_bytes=2**20),
            draft_model=tiny_model(),
        )
