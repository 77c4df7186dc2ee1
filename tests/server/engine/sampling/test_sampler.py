"""Sampling against the plain-Python twin; in a batch, each sequence on its own, failures included."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.devices import virtual
from bigmodel.server.engine.core import OutputStream
from bigmodel.server.engine.sampling.sampler import NotNumbersError, Sampler, choose, likeliest, logprob_of
from bigmodel.server.engine.scheduling.request import Delta, Observer, Request, Sequence, SequencePhase
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from bigmodel.server.text.codec import TextCodec
from tests.examples import few
from tests.server import oracle
from tests.server.tiny import make_request, tiny_tokenizer


def sequence(output: list[int] | None = None, **params: Any) -> Sequence:
    params.setdefault("seed", 0)
    made = make_request([1, 2, 2, 3], **params).sequences[0]
    made.output = output or []
    return made


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    rows = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 1.0]])
    assert likeliest(rows) == [1, 0, 3]


def test_a_row_with_nan_has_no_likeliest_token() -> None:
    rows = torch.tensor([[0.0, float("nan"), 9.0], [0.0, 1.0, 0.0]])
    assert likeliest(rows) == [None, 1]


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}]
)
def test_no_token_is_chosen_by_nan(params: dict[str, Any]) -> None:
    with pytest.raises(NotNumbersError):
        choose(sequence(**params), torch.tensor([0.0, float("nan"), 9.0]))


@pytest.mark.parametrize("temperature", [1e-29, 1e-310, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert choose(sequence(temperature=temperature), torch.tensor([1.0, 30.0, -1e4, 29.9])) == 1


def test_a_total_probability_of_zero_keeps_the_likeliest_token() -> None:
    assert {choose(sequence(top_p=0.0, seed=seed), torch.tensor([1.0, 1.5, 0.5])) for seed in range(20)} == {1}


finite = st.floats(-20, 20, allow_nan=False, width=32)


@pytest.mark.slow
@settings(max_examples=few(100), deadline=None)
@given(
    logits=st.lists(finite, min_size=8, max_size=40, unique=True),
    output=st.lists(st.integers(0, 7), max_size=6),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.9]),
            "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
            "top_k": st.sampled_from([0, 1, 3, 100]),
            "min_p": st.sampled_from([0.0, 0.1, 1.0]),
            "presence_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
            "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.5]),
            "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
            "logit_bias": st.sampled_from([{}, {3: 5.0, 4: -100.0}]),
            "seed": st.integers(0, 2**32),
        }
    ),
)
def test_choices_are_equal_to_those_of_the_reference(
    logits: list[float], output: list[int], params: dict[str, Any]
) -> None:
    made = sequence(output, **params)
    rng = random.Random(params["seed"] * 1_000_003)
    expected = oracle.choose(logits, made.request.prompt, output, made.params, rng)
    assert choose(made, torch.tensor(logits)) == expected


@pytest.mark.parametrize("steps", [None, 40])
@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.9999}, {"top_k": 40}, {"top_k": 300, "top_p": 0.8}, {"min_p": 0.3}],
)
def test_choices_from_a_large_vocabulary_are_equal_to_those_of_the_reference(
    params: dict[str, Any], steps: int | None
) -> None:
    """Where sorting all of it is avoided; with ``steps`` many tokens are equally likely."""
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(0)) * 2
    if steps is not None:
        logits = (logits * steps).round() / steps
    for temperature, seed in ((0.4, 1), (1.0, 2), (2.0, 3)):
        made = sequence(seed=seed, temperature=temperature, **params)
        rng = random.Random(seed * 1_000_003)
        assert choose(made, logits) == oracle.choose(logits.tolist(), [], [], made.params, rng)


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    made = sequence(temperature=1.0, seed=5)
    counts = Counter(choose(made, logits) for _ in range(4000))
    for token, probability in enumerate(torch.softmax(logits, 0).tolist()):
        deviation = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(counts[token] / 4000 - probability) < 5 * deviation


def test_sequences_have_separate_random_streams() -> None:
    """What others draw in between changes nothing; each choice of a request draws its own."""
    logits = torch.zeros(50)
    a, again, other = sequence(seed=1), sequence(seed=1), sequence(seed=2)
    alone = [choose(a, logits) for _ in range(20)]
    mixed = []
    for _ in range(20):
        choose(other, logits)
        mixed.append(choose(again, logits))
    assert alone == mixed
    first, second = make_request([1], seed=1, n=2).sequences
    assert [choose(first, logits) for _ in range(20)] != [choose(second, logits) for _ in range(20)]


def test_adjusting_does_not_change_the_logits_given() -> None:
    logits = torch.ones(10)
    choose(sequence([1], temperature=0, presence_penalty=2.0, logit_bias={1: 3.0}), logits)
    assert torch.equal(logits, torch.ones(10))


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    entry = logprob_of(logits, 0, 2)
    expected = torch.log_softmax(logits, 0)
    assert entry.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in entry.top] == [2, 1]
    assert entry.top[0][1] == pytest.approx(float(expected[2]))
    assert logprob_of(logits, 0, 0).top == ()


VOCABULARY = 261


class Told:
    """Keeps what is sent and what fails."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.failures: list[tuple[Request, str]] = []
        self.sampler = Sampler(Observer(), lambda sequence, delta: self.deltas.append(delta), self._fail)

    def _fail(self, request: Request, message: str) -> None:
        self.failures.append((request, message))


def running(**params: Any) -> Sequence:
    (sequence,) = make_request([1, 2, 3], **params).sequences
    sequence.phase = SequencePhase.RUNNING
    sequence.computed = 3
    sequence.stream = OutputStream(sequence, TextCodec(tiny_tokenizer()), frozenset(), 100)
    return sequence


def logits(*tokens: int) -> torch.Tensor:
    """Rows in which these are by far the likeliest."""
    rows = torch.zeros(len(tokens), VOCABULARY)
    rows[range(len(tokens)), list(tokens)] = 50.0
    return rows


def test_greedy_and_drawn_tokens_are_chosen_side_by_side() -> None:
    told, greedy, drawn = Told(), running(temperature=0), running(temperature=1, seed=0)
    told.sampler.sample([(ScheduledTokens(greedy, 1), logits(7)), (ScheduledTokens(drawn, 1), logits(9))])
    assert (greedy.output, drawn.output) == ([7], [9])
    assert told.sampler.counts.generated == 2
    assert [delta.token_ids for delta in told.deltas] == [(7,), (9,)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_is_sampled_from_may_be_on_its_way_meanwhile(temperature: float, accelerators: None) -> None:
    virtual.enable(1, strict=True, late_compute=True)
    told, sequence = Told(), running(temperature=temperature, seed=0)
    rows = logits(7).to("virtual:0")
    before = virtual.host_waits()
    arriving = told.sampler.begin([(ScheduledTokens(sequence, 1), rows)], wait=False)
    assert virtual.host_waits().since(before) == (0, 0, 0)
    assert sequence.output == []
    told.sampler.finish(arriving)
    assert sequence.output == [7]


def test_nan_logits_fail_only_their_own_request() -> None:
    told, good, bad = Told(), running(temperature=0), running(temperature=0)
    told.sampler.sample([(ScheduledTokens(bad, 1), logits(7) * float("nan")), (ScheduledTokens(good, 1), logits(9))])
    assert [request for request, _ in told.failures] == [bad.request]
    assert "not numbers" in told.failures[0][1]
    assert (bad.output, good.output) == ([], [9])


def test_draft_tokens_are_accepted_up_to_the_first_mismatch() -> None:
    told, sequence = Told(), running(temperature=0)
    told.sampler.sample([(ScheduledTokens(sequence, 1, draft=(5, 6, 7)), logits(5, 6, 8, 9))])
    assert sequence.output == [5, 6, 8]
    assert sequence.computed == 5  # the two right guesses are computed too
    counts = told.sampler.counts
    assert (counts.generated, counts.drafted, counts.accepted) == (3, 3, 2)


def test_no_token_is_sampled_with_max_tokens_zero() -> None:
    told, sequence = Told(), running(max_tokens=0)
    told.sampler.sample([(ScheduledTokens(sequence, 1), logits(5))])
    assert sequence.output == []
    assert [delta.finish_reason for delta in told.deltas] == ["length"]
