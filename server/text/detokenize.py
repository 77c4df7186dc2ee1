"""Tokens to text, a few at a time, never half a character."""

from __future__ import annotations

from server.text.codec import TextCodec

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns a growing list of tokens into pieces of text that add up to the whole.

    What a token reads as may depend on the one before it (a leading space, a half character), so each piece
    is the difference of two decodings that start a little earlier.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []  # tokens since the start of the last piece that was given out
        self._seen = 0  # how many of them that piece covered

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._codec.decode(self._ids[: self._seen])
        after = self._codec.decode(self._ids)
        if after.endswith(_REPLACEMENT) and self._may_complete():
            return ""
        del self._ids[: self._seen]
        self._seen = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left when no more tokens come: an incomplete character reads as U+FFFD."""
        text = self._codec.decode(self._ids)[len(self._codec.decode(self._ids[: self._seen])) :]
        self._ids, self._seen = [], 0
        return text

    def _may_complete(self) -> bool:
        # A character has at most four bytes. More unread tokens than that ending in U+FFFD are not
        # waiting for anything: the model wrote bytes that are no character.
        return len(self._ids) - self._seen < 4
