"""Log-probabilities in OpenAI's two formats: that of chats and that of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigmodel.server.engine.scheduling.request import TokenLogprob
from bigmodel.server.text.codec import Detokenizer, TextCodec

LOWEST = -9999.0  # JSON has no minus infinity


class TextOffsets:
    """Character offsets of tokens in the text of a choice.

    They are not sums of the lengths of single tokens: special tokens have no text, bytes of one character share its
    offset, and a leading space may be stripped. ``before`` are the tokens that the text continues.
    """

    def __init__(self, codec: TextCodec, before: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(codec, before)
        self._shown = 0

    def following(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in token_ids:
            offsets.append(self._shown)
            self._shown += len(self._detokenizer.add(token))
        return offsets


def chat_logprobs(entries: tuple[TokenLogprob, ...], codec: TextCodec) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    return {
        "content": [
            {
                **_one(entry.token_id, entry.logprob, codec),
                "top_logprobs": [_one(token, logprob, codec) for token, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: tuple[TokenLogprob | None, ...], token_ids: tuple[int, ...], codec: TextCodec, offsets: TextOffsets
) -> dict[str, Any]:
    """The ``logprobs`` of a completion choice. An entry is None for a prompt's first token."""
    return {
        "tokens": [codec.token_text(token) for token in token_ids],
        "token_logprobs": [None if e is None else max(e.logprob, LOWEST) for e in entries],
        "top_logprobs": [None if e is None else _top(e, codec) for e in entries],
        "text_offset": offsets.following(token_ids),
    }


def _top(entry: TokenLogprob, codec: TextCodec) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in entry.top:  # parts of characters are shown alike: the likeliest stands for all
        found.setdefault(codec.token_text(token), max(logprob, LOWEST))
    return found


def _one(token: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    return {
        "token": codec.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(codec.token_bytes(token)),
    }
