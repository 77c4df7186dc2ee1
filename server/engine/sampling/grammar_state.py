"""The position of an answer in its grammar, in the process that has the compiled grammar."""

from __future__ import annotations

from typing import Any

import torch


class GrammarState:
    """The position of one sequence in its grammar.

    Args:
        compiled: xgrammar's compiled grammar.
        vocabulary_size: width of the model's logits.
        stop_ids: tokens that end an output.
    """

    def __init__(self, compiled: Any, vocabulary_size: int, stop_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not stop_ids)
        self._stops = xgrammar.allocate_token_bitmask(1, vocabulary_size).zero_()
        for token in stop_ids:
            self._stops[0, token // 32] |= _bit(token % 32)
        self.bitmask: torch.Tensor = xgrammar.allocate_token_bitmask(1, vocabulary_size)
        """A bit for each token that can come next, as of the last `fill`."""

    def fill(self) -> None:
        """Compute the mask of the next token: none can come next where the output is complete."""
        if self._matcher.is_terminated():
            self.bitmask.zero_()
        else:
            self._matcher.fill_next_token_bitmask(self.bitmask)

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing can follow. `fill` comes first."""
        if self._matcher.is_terminated():
            return True
        # A number may continue after it is valid: complete is only what end tokens alone can follow.
        return self._matcher.is_completed() and not bool((self.bitmask & ~self._stops).any())

    def advance(self, token_id: int) -> bool:
        """Account for a token; False if it cannot come next."""
        return bool(self._matcher.accept_token(token_id))

    def go_back(self, tokens: int) -> None:
        """Forget the last so many tokens."""
        self._matcher.rollback(tokens)


def _bit(position: int) -> int:
    """Bit ``position`` of a signed 32-bit word."""
    return 1 << position if position < 31 else -(1 << 31)
