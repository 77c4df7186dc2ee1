"""Stop strings, found also where they lie across token borders."""

from __future__ import annotations


class StopChecker:
    """Lets text through until a stop string appears; holds back what may be the beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take new ``text``; return (text that may be shown, whether a stop string was met).

        After a stop nothing of the stop string or beyond it is ever shown.
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
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        longest = min(len(text), max(len(string) for string in self._stop) - 1)
        for length in range(longest, 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop):
                return length
        return 0
