"""Speculative decoding where it pays: as many tokens are proposed as the plan predicts to be fastest."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import Any

from bigmodel.server.engine.compute.draft import Drafter
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens


class PlannedDrafter:
    """Proposes what ``drafter`` does, in steps in which proposals are predicted to be faster, and no more than that.

    A step over sixteen sequences of a mixture chooses most experts anyway; one over a single sequence would fetch those
    of each proposed token. ``speculation`` is what the plan says of such passes.

    Attributes:
        drafter: What proposes.
        skipped: Steps in which nothing was proposed, as that was predicted to be faster.
    """

    def __init__(self, drafter: Drafter, speculation: Any) -> None:
        self.drafter = drafter
        self.speculation = speculation
        self.skipped = 0
        self._counts: dict[int, int] = {}

    def bytes_per_token(self) -> dict[str, int]:
        """See :meth:`Drafter.bytes_per_token`."""
        return self.drafter.bytes_per_token()

    def count(self, sequences: int) -> int:
        """Tokens that are proposed for each of so many sequences at once."""
        if sequences not in self._counts:
            self._counts[sequences] = self.speculation.count(sequences)
        return self._counts[sequences]

    def watching(self, batch: Seq[ScheduledTokens]) -> AbstractContextManager[None]:
        """See :meth:`Drafter.watching`."""
        return self.drafter.watching(batch)

    def propose(self, sequences: Seq[Sequence]) -> None:
        """See :meth:`Drafter.propose`."""
        count = self.count(len(sequences)) if sequences else 0
        if sequences and not count:
            self.skipped += 1
            for sequence in sequences:
                sequence.draft = []
            return
        self.drafter.propose(sequences)
        for sequence in sequences:
            del sequence.draft[count:]
