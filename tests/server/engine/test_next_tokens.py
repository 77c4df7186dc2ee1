"""From logits to tokens: each sequence on its own, failures included."""

from __future__ import annotations

from typing import Any

import torch

from bigmodel.server.engine.choice import Choice
from bigmodel.server.engine.next_tokens import NextTokens
from bigmodel.server.engine.observer import Observer
from bigmodel.server.engine.request import Delta, Phase, Request, Sequence
from bigmodel.server.engine.scheduler import Grant
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import make_request, tiny_tokenizer

VOCABULARY = 261


class Told:
    """Keeps what is sent and what fails."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.failures: list[tuple[Request, str]] = []
        self.tokens = NextTokens(Observer(), lambda sequence, delta: self.deltas.append(delta), self._fail)

    def _fail(self, request: Request, message: str) -> None:
        self.failures.append((request, message))


def running(**params: Any) -> Sequence:
    (sequence,) = make_request([1, 2, 3], **params).sequences
    sequence.phase = Phase.RUNNING
    sequence.computed = 3
    sequence.text = Choice(sequence, TextCodec(tiny_tokenizer()), frozenset(), 100)
    return sequence


def logits(*tokens: int) -> torch.Tensor:
    """Rows in which these are by far the likeliest."""
    rows = torch.zeros(len(tokens), VOCABULARY)
    rows[range(len(tokens)), list(tokens)] = 50.0
    return rows


def test_greedy_and_drawn_tokens_are_chosen_side_by_side() -> None:
    told, greedy, drawn = Told(), running(temperature=0), running(temperature=1, seed=0)
    told.tokens.choose([(Grant(greedy, 1), logits(7)), (Grant(drawn, 1), logits(9))])
    assert (greedy.output, drawn.output) == ([7], [9])
    assert told.tokens.counts.generated == 2
    assert [delta.token_ids for delta in told.deltas] == [(7,), (9,)]


def test_logits_that_are_no_numbers_fail_their_own_request_only() -> None:
    told, good, bad = Told(), running(temperature=0), running(temperature=0)
    told.tokens.choose([(Grant(bad, 1), logits(7) * float("nan")), (Grant(good, 1), logits(9))])
    assert [request for request, _ in told.failures] == [bad.request]
    assert "not numbers" in told.failures[0][1]
    assert (bad.output, good.output) == ([], [9])


def test_guesses_are_taken_as_far_as_they_are_right() -> None:
    told, sequence = Told(), running(temperature=0)
    told.tokens.choose([(Grant(sequence, 1, draft=(5, 6, 7)), logits(5, 6, 8, 9))])
    assert sequence.output == [5, 6, 8]
    assert sequence.computed == 5  # the two right guesses are computed too
    counts = told.tokens.counts
    assert (counts.generated, counts.drafted, counts.accepted) == (3, 3, 2)


def test_no_token_is_chosen_where_none_is_wanted() -> None:
    told, sequence = Told(), running(max_tokens=0)
    told.tokens.choose([(Grant(sequence, 1), logits(5))])
    assert sequence.output == []
    assert [delta.finish_reason for delta in told.deltas] == ["length"]
