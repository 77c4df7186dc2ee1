"""Reasoning ends at its bound, and what is no reasoning is not bounded."""

from __future__ import annotations

import pytest

from bigmodel.server.engine.sampling.reasoning_budget import ReasoningBudget
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())
TAGS = ("<t>", "</t>")


def forced_after(text: str, tokens: int, *, opened: bool = False) -> tuple[int, str]:
    """Where the tag is forced into a text, in tokens, and what is forced; (-1, "") if nothing is."""
    state = ReasoningBudget(tokens, TAGS, opened, CODEC).state()
    output: list[int] = []
    for token in CODEC.encode(text):
        output.append(token)
        state.advance(output)
        if state.forced is not None:
            place, forced = len(output), []
            while (token := state.forced) is not None:
                forced.append(token)
                output.append(token)
                state.advance(output)
            return place, CODEC.decode(forced)
    return -1, ""


@pytest.mark.parametrize(
    ("text", "tokens", "opened", "found"),
    [
        ("<t>abcdef", 4, False, (7, "</t>")),
        ("abcdef", 4, True, (4, "</t>")),
        ("<t>ab</t>cdefgh", 6, False, (-1, "")),
        ("ab</t>cdefgh", 6, True, (-1, "")),
        ("abcdef", 4, False, (-1, "")),
        ("a" * 40 + "<t>abcdef", 4, False, (-1, "")),
    ],
)
def test_the_end_is_forced_at_the_bound(text: str, tokens: int, opened: bool, found: tuple[int, str]) -> None:
    assert forced_after(text, tokens, opened=opened) == found


def test_the_end_is_forced_once() -> None:
    state = ReasoningBudget(1, TAGS, True, CODEC).state()
    output: list[int] = []
    for token in CODEC.encode("a") + CODEC.encode("</t>") + CODEC.encode("bcd"):
        output.append(token)
        state.advance(output)
    assert state.forced is None
