"""Generated tokens to text, piece by piece: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.server.text.codec import TextCodec

_BYTES = 4  # of the longest UTF-8 character
_REPLACEMENT = "\ufffd"
_LONG = 32  # undecoded tokens from which a run of invalid bytes is shortened


class Detokenizer:
    """Decodes a growing list of tokens into pieces of text whose concatenation is the whole text.

    The text of a token may depend on the one before (a leading space, a partial character), so each piece is decoded
    together with the tokens of the piece before; the first one with the end of the ``prompt``. A trailing U+FFFD may be
    the first bytes of a character: it is held back until the next token.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._before = self._end_of(prompt)  # tokens of the last whole piece, already given out
        self._before_text = codec.decode(self._before)
        self._unread: list[int] = []
        self._shown = 0  # characters of the undecoded tokens' text already given out

    def add(self, token_id: int) -> str:
        """The text completed by ``token_id``; empty while a character is incomplete."""
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
        """The rest when no more tokens come; an incomplete character becomes U+FFFD."""
        text = self._text()[self._shown :]
        self._before, self._before_text, self._unread, self._shown = [], "", [], 0
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of ``prompt`` that decode to whole characters; none if the last four do not."""
        for count in range(1, _BYTES + 1):
            end = list(prompt[-count:])
            if not self._codec.decode(end).endswith(_REPLACEMENT):
                return end
        return []

    def _text(self) -> str:
        return self._codec.decode(self._before + self._unread)[len(self._before_text) :]

    def _shorten(self) -> None:
        """Drop leading tokens already given out, where decoding the rest alone gives the same text."""
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


class StopChecker:
    """Passes text through until a stop string appears, also across tokens; holds back a possible beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; returns the text to send, and whether a stop string was found.

        The stop string and everything after it are never sent.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        starts = [at for at in (text.find(string) for string in self._stop) if at >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(string) for string in self._stop) - 1)
        for length in range(longest, 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop):
                return length
        return 0
