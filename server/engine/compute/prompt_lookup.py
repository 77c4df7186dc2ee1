"""Speculative decoding without a model: texts that repeat themselves are continued as they were before.

Answers quote their prompts: code that is edited, documents that are summed up, names. The last tokens of a sequence are
looked up in its own text, and what followed them there is proposed (Saxena, "Prompt Lookup Decoding", 2023). It takes
microseconds and no memory of a device, and pays where verifying several tokens takes as long as computing one: where
weights are streamed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

LENGTHS = (3, 2)
"""Numbers of last tokens that are looked up, one after the other."""

REACH = 2**16
"""Tokens back from the end of a text in which they are looked up."""

MOST_PAUSE = 64
"""Steps in which nothing is proposed for a sequence whose proposals were all rejected, at most."""


@dataclass
class _LookupState:
    """State of one sequence: its text, the tokens last proposed for it, and the limit of their number."""

    limit: int
    text: array[int] = field(default_factory=lambda: array("i"))
    proposed: list[int] = field(default_factory=list)
    pause: int = 0
    rejected: int = 0

    def read(self, sequence: Sequence, count: int) -> None:
        """Take the sequence's new tokens, and adapt the number of proposals to how many of the last were right."""
        known = len(self.text)
        self.text.extend(sequence.token_slice(known, len(sequence)))
        new = self.text[known:]
        if not self.proposed:
            self.pause = max(self.pause - 1, 0)
            return
        right = next(
            (index for index, token in enumerate(self.proposed) if index >= len(new) or new[index] != token),
            len(self.proposed),
        )
        if right == len(self.proposed):
            self.limit = min(2 * self.limit, count)
        else:
            self.limit = right + 1
        self.rejected = 0 if right else self.rejected + 1
        if self.rejected > 1:
            self.pause = min(2**self.rejected, MOST_PAUSE)
        self.proposed = []

    def propose(self, most: int) -> list[int]:
        """Return tokens that may follow the text, at most so many."""
        if self.pause or most < 1:
            return []
        for length in LENGTHS:
            found = self._latest(length)
            if found is not None:
                # A text that ends in a loop goes on with it: what is proposed is copied, too.
                period, copied = len(self.text) - found, list(self.text[found : found + most])
                while len(copied) < most:
                    copied.append(copied[-period])
                self.proposed = copied
                return copied
        return []

    def _latest(self, length: int) -> int | None:
        """Return where the text goes on after the latest earlier place of its last `length` tokens; None: nowhere."""
        text, size = self.text, self.text.itemsize
        if len(text) <= length:
            return None
        first = max(len(text) - REACH, 0)
        haystack, needle = text[first:-1].tobytes(), text[-length:].tobytes()
        place = haystack.rfind(needle)
        while place >= 0 and place % size:  # between two tokens
            place = haystack.rfind(needle, 0, place + len(needle) - 1)
        return None if place < 0 else first + place // size + length


class PromptLookup:
    """Proposes up to ``count`` tokens for each sequence by what followed its last tokens earlier in its text.

    Fewer are proposed after some were rejected, and none for a while after all were, twice in a row.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._states: dict[int, _LookupState] = {}

    def bytes_per_token(self) -> dict[str, int]:
        """See :meth:`Drafter.bytes_per_token`."""
        return {}

    def watching(self, batch: Seq[ScheduledTokens]) -> AbstractContextManager[None]:
        """See :meth:`Drafter.watching`."""
        return nullcontext()

    def propose(self, sequences: Seq[Sequence]) -> None:
        """See :meth:`Drafter.propose`."""
        known, self._states = self._states, {}
        for sequence in sequences:
            state = known.get(sequence.order) or _LookupState(self.count)
            state.read(sequence, self.count)
            wanted = sequence.params.max_tokens - len(sequence.output) - 1
            sequence.draft = list(state.propose(min(state.limit, wanted)))
            self._states[sequence.order] = state
