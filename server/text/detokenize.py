"""Tokens to text, a few at a time, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.server.text.codec import TextCodec

_BYTES = 4  # of the longest character in UTF-8
_REPLACEMENT = "\ufffd"
_LONG = 32  # unread tokens from which a run of bytes that are no characters is shortened


class Detokenizer:
    """Turns a growing list of tokens into pieces of text that add up to the whole.

    What a token reads as may depend on the one before it (a leading space, a half character), so each piece
    is read together with the tokens of the piece before; the first one with the end of the ``prompt`` that it
    continues. A text that ends in U+FFFD may end in the first bytes of a character: that last one is held back
    until the next token tells.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._before = self._end_of(prompt)  # the tokens of the last whole piece, shown already
        self._before_text = codec.decode(self._before)
        self._unread: list[int] = []
        self._shown = 0  # characters of the unread tokens' text that were given out

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        if token_id in self._codec.special_ids:
            return ""
        self._unread.append(token_id)
        text = self._text()
        incomplete = text.endswith(_REPLACEMENT)
        stable = text[:-1] if incomplete else text
        piece = stable[self._shown :]
        self._shown = len(stable)
        if text and not incomplete:
            self._before, self._unread, self._shown = self._unread, [], 0
            self._before_text = self._codec.decode(self._before)
        elif len(self._unread) >= _LONG:
            self._shorten()
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come: an incomplete character reads as U+FFFD."""
        text = self._text()[self._shown :]
        self._before, self._before_text, self._unread, self._shown = [], "", [], 0
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last token of ``prompt``, or the last few that make whole characters; none where those do not."""
        for count in range(1, _BYTES + 1):
            end = list(prompt[-count:])
            if not self._codec.decode(end).endswith(_REPLACEMENT):
                return end
        return []

    def _text(self) -> str:
        return self._codec.decode(self._before + self._unread)[len(self._before_text) :]

    def _shorten(self) -> None:
        """Forget leading tokens that were shown, at a place where reading on alone gives the same text."""
        whole = self._text()
        for cut in range(len(self._unread) - 4, 0, -1):
            tail = self._codec.decode(self._unread[cut:])
            dropped = len(whole) - len(tail)
            if dropped <= self._shown and whole.endswith(tail):
                head = self._codec.decode(self._before + self._unread[:cut])[len(self._before_text) :]
                if head + tail == whole:
                    self._before, self._before_text = [], ""
                    self._unread = self._unread[cut:]
                    self._shown -= dropped
                    return
