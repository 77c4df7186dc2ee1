"""Tokens become text, stop strings end it, and what is held back comes with what shows it."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.engine.choice import Choice
from bigmodel.server.engine.request import Delta, Sequence, TokenLogprob
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import make_request, tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())
END = tiny_tokenizer().eos_token_id


class Writer:
    """Feeds a choice token by token, as the engine does."""

    def __init__(self, *, eos: frozenset[int] = frozenset((END,)), max_length: int = 100, **params: Any) -> None:
        self.sequence: Sequence = make_request([1, 2, 3], **params).sequences[0]
        self._choice = Choice(self.sequence, CODEC, eos, max_length)

    def write(self, text: str | bytes | list[int]) -> list[Delta]:
        """The deltas that the tokens of ``text`` bring forth, up to the last one of the choice."""
        tokens = text if isinstance(text, list) else [CODEC.encode(c)[0] for c in text] if isinstance(text, str) else []
        deltas: list[Delta] = []
        for token in tokens:
            self.sequence.output.append(token)
            delta = self._choice.take(token, TokenLogprob(token, -1.0))
            deltas += [] if delta is None else [delta]
            if deltas and deltas[-1].finish_reason is not None:
                break
        return deltas


def test_each_token_shows_its_text() -> None:
    assert [(d.text, d.finish_reason) for d in Writer().write("cat")] == [("c", None), ("a", None), ("t", None)]


def test_half_a_character_waits_for_the_other_half() -> None:
    halves = [CODEC.tokenizer.convert_tokens_to_ids(letter) for letter in "Ã¶"]  # the two bytes of ö
    (delta,) = Writer().write(halves)
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("ö", tuple(halves), 2)


@pytest.mark.parametrize(("max_tokens", "max_length"), [(2, 100), (50, 5)])
def test_it_ends_at_its_own_limit_or_at_the_context_s(max_tokens: int, max_length: int) -> None:
    deltas = Writer(max_tokens=max_tokens, max_length=max_length).write("cats")
    assert [(d.text, d.finish_reason) for d in deltas] == [("c", None), ("a", "length")]


def test_an_end_token_is_not_shown() -> None:
    *_, last = Writer().write([*CODEC.encode("c"), END])
    assert (last.text, last.token_ids, last.finish_reason) == ("", (), "stop")


def test_an_end_token_may_be_ignored() -> None:
    deltas = Writer(ignore_eos=True).write([END, *CODEC.encode("c")])
    assert all(delta.finish_reason is None for delta in deltas)


def test_a_stop_string_is_never_shown_and_its_beginning_only_when_it_is_not_one() -> None:
    deltas = Writer(stop=("end",)).write("an ex end!")
    assert "".join(delta.text for delta in deltas) == "an ex "
    assert deltas[-1].finish_reason == "stop"
    shown = [delta.text for delta in deltas]
    assert "e" not in shown  # held back until "x" shows that it begins no stop string
    assert "ex" in shown


def test_what_is_held_back_is_shown_at_the_end() -> None:
    deltas = Writer(stop=("end",), max_tokens=2).write("en")
    assert [(d.text, d.finish_reason) for d in deltas] == [("en", "length")]
