"""Log-probabilities in the two shapes OpenAI gives them."""

from __future__ import annotations

from typing import Any

from server.engine import TokenLogprob
from server.text.codec import TextCodec

LOWEST = -9999.0  # JSON has no minus infinity


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
    entries: tuple[TokenLogprob | None, ...], token_ids: tuple[int, ...], codec: TextCodec, offset: int
) -> tuple[dict[str, Any], int]:
    """The ``logprobs`` of a completion choice, and the text offset after them.

    ``offset``: characters of text before these tokens. An entry is None for a prompt's first token.
    """
    tokens = [codec.token_text(token) for token in token_ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    result = {
        "tokens": tokens,
        "token_logprobs": [None if e is None else max(e.logprob, LOWEST) for e in entries],
        "top_logprobs": [None if e is None else _top(e, codec) for e in entries],
        "text_offset": offsets,
    }
    return result, offset


def _top(entry: TokenLogprob, codec: TextCodec) -> dict[str, float]:
    return {codec.token_text(token): max(logprob, LOWEST) for token, logprob in entry.top}


def _one(token: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    return {
        "token": codec.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(codec.token_bytes(token)),
    }
