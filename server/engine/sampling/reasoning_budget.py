"""A bound on the tokens that a model reasons before its answer: at the bound, the tag that ends it is forced."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bigmodel.server.text.codec import TextCodec

_WINDOW = 16  # tokens that a tag takes at most; reasoning begins within so many, if at all


@dataclass(frozen=True)
class ReasoningBudget:
    """The bound of one request.

    Args:
        tokens: Most tokens of reasoning, its tags not counted.
        tags: Texts that begin and end it.
        opened: Whether the prompt ends within the reasoning.
        codec: The tokenizer.
    """

    tokens: int
    tags: tuple[str, str]
    opened: bool
    codec: TextCodec

    def state(self) -> ReasoningState:
        """The state of one sequence, before its first token."""
        return ReasoningState(self)


class ReasoningState:
    """Follows one sequence."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._count = 0
        self._open = budget.opened
        self._closed = False
        self._forced: deque[int] = deque()

    @property
    def forced(self) -> int | None:
        """The token that has to come next, if any has to."""
        return self._forced[0] if self._forced else None

    def advance(self, output: Seq[int]) -> None:
        """Note the last token of ``output``, which are all tokens so far."""
        if self._forced:
            self._forced.popleft()
            return
        if self._closed:
            return
        budget = self._budget
        begin, end = budget.tags
        text = budget.codec.decode(list(output[-_WINDOW:]), skip_special_tokens=False)
        if end in text:
            self._closed = True
        elif self._open:
            self._count += 1
        elif begin in text:
            self._open = True
        else:
            self._closed = len(output) >= _WINDOW
        if self._open and not self._closed and self._count >= budget.tokens:
            self._closed = True
            self._forced.extend(budget.codec.encode(end, add_special_tokens=False))
