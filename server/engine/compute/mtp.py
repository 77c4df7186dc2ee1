"""Speculative decoding with the checkpoint's own head: it proposes tokens from the states that the model computed.

At each position the head is given the model's state there and the embedding of the token behind it, and its state
predicts the token after that one. Its keys and values are of the positions that the model computed in this process: a
prompt that comes from the prefix cache brings none, and the head attends to what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bigmodel.server.engine.compute.host_linear import HostLinear
from bigmodel.server.engine.compute.runner import PackedRunner, PackedTokens
from bigmodel.server.engine.kv.buffers import SequenceKV, round_up
from bigmodel.server.engine.sampling.sampler import likeliest
from bigmodel.server.engine.scheduling.request import Sequence, SequencePhase
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

logger = logging.getLogger(__name__)

_MOST_KEPT = 32
"""States that wait for a sequence's next proposal, at most: of more, the head reads those of known tokens at once."""


@dataclass
class _HeadState:
    """The head's keys and values of one sequence.

    Attributes:
        sequence: The sequence.
        first: Position of the sequence that its first keys and values are of.
        read: How many positions they are of.
        waiting: States [positions, width] of the model behind these, that the head has not been given yet.
        kv: The keys and values.
    """

    sequence: Sequence
    first: int
    waiting: torch.Tensor
    read: int = 0
    kv: SequenceKV = field(default_factory=SequenceKV)

    @property
    def next(self) -> int:
        """Position of the first waiting state."""
        return self.first + self.read


class MtpDrafter:
    """Proposes up to ``count`` tokens for each sequence with the MTP head of ``model``.

    The head predicts one token. To propose several it is given its own state in the place of the model's.
    """

    def __init__(self, model: Any, head: Any, count: int, *, host_linear: HostLinear = "auto") -> None:
        self.count = count
        self._model = model
        self._head = head
        self._runner = PackedRunner(head, row_multiple=1, host_linear=host_linear)
        self._states: dict[int, _HeadState] = {}

    def bytes_per_token(self) -> dict[str, int]:
        """See :meth:`.draft.Drafter.bytes_per_token`."""
        return self._runner.bytes_per_token()

    # --- the model's states --------------------------------------------------------------------------

    @contextmanager
    def watching(self, batch: Seq[ScheduledTokens]) -> Iterator[None]:
        """See :meth:`.draft.Drafter.watching`."""
        taken: list[torch.Tensor] = []

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            taken.append(output.last_hidden_state[0])

        hook = self._model.base_model.register_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()
        try:
            self._take(batch, taken[-1])
        except Exception:
            logger.exception("the states of %d sequences are lost to the head that proposes tokens", len(batch))
            self._states = {}

    def _take(self, batch: Seq[ScheduledTokens], states: torch.Tensor) -> None:
        """Keep the states [rows, width] that a step computed; let the head read those of prompts."""
        row = 0
        long = []
        for scheduled in batch:
            sequence, rows = scheduled.sequence, scheduled.tokens + len(scheduled.draft)
            own, row = states[row : row + rows], row + rows
            if not sequence.takes_drafts or scheduled.pooled_rows is not None:
                continue
            state = self._states.get(sequence.order)
            start = sequence.computed
            if state is None or not state.next <= start <= state.next + len(state.waiting):
                state = self._states[sequence.order] = _HeadState(sequence, start, own[:0])
            # Those behind the sequence's computed tokens were of proposals that were rejected.
            state.waiting = torch.cat([state.waiting[: start - state.next], own])
            if len(state.waiting) > _MOST_KEPT:
                long.append((sequence, min(len(state.waiting), start + scheduled.tokens - state.next)))
        pairs = [(sequence, min(count, len(sequence) - 1 - self._of(sequence).next)) for sequence, count in long]
        self._read([(sequence, count) for sequence, count in pairs if count > 0], keep=False)

    def _of(self, sequence: Sequence) -> _HeadState:
        return self._states[sequence.order]

    # --- proposals -----------------------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence]) -> None:
        """See :meth:`.draft.Drafter.propose`."""
        # Those that compute their prompts are not among `sequences`, and keep what they have.
        self._states = {
            order: state for order, state in self._states.items() if state.sequence.phase is SequencePhase.RUNNING
        }
        try:
            self._propose(sequences)
        except BaseException:
            self._states = {}  # some layers may have keys and values of more tokens than others
            raise

    def _propose(self, sequences: Seq[Sequence]) -> None:
        ready = []
        for sequence in sequences:
            sequence.draft = []
            state = self._states.get(sequence.order)
            count = 0 if state is None else sequence.computed - state.next
            if state is not None and 0 < count <= len(state.waiting) and self._useful(sequence) > 0:
                ready.append((sequence, count))
        if not ready:
            return
        logits, states = self._read(ready, keep=True)
        going = [sequence for sequence, _ in ready]
        for depth in range(self.count):
            for sequence, token in zip(going, likeliest(logits), strict=True):
                # Any token will do where logits are not numbers: proposals are verified.
                sequence.draft.append(token or 0)
            more = [index for index, sequence in enumerate(going) if len(sequence.draft) < self._useful(sequence)]
            if not more or depth + 1 == self.count:
                return
            going, states = [going[index] for index in more], states[more]
            batch = [self._packed(s, s.draft[-1:], depth, keep=True) for s in going]
            logits, states = self._compute(batch, states, keep=True)

    def _useful(self, sequence: Sequence) -> int:
        """Return the number of useful proposals: the model itself samples the token after the last one."""
        return min(self.count, sequence.params.max_tokens - len(sequence.output) - 1)

    def _read(self, items: Seq[tuple[Sequence, int]], keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the head so many waiting states of each sequence, with the tokens behind them; as `_compute`."""
        if not items:
            return torch.empty(0), torch.empty(0)
        batch, states = [], []
        for sequence, count in items:
            state = self._of(sequence)
            tokens = sequence.token_slice(state.next + 1, state.next + 1 + count)
            batch.append(self._packed(sequence, tokens, 0, keep))
            states.append(state.waiting[:count])
        found = self._compute(batch, torch.cat(states), keep)
        for sequence, count in items:
            state = self._of(sequence)
            state.read, state.waiting = state.read + count, state.waiting[count:].clone()
        return found

    def _packed(self, sequence: Sequence, tokens: list[int], ahead: int, keep: bool) -> PackedTokens:
        """Tokens behind those that the head has read, and `ahead` proposed ones."""
        state = self._of(sequence)
        start = state.read + ahead
        state.kv.reserve(round_up(start + len(tokens)))
        return PackedTokens(state.kv, tokens, start, start + len(tokens), int(keep))

    def _compute(
        self, batch: list[PackedTokens], states: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [sequences, vocabulary] after each entry, and the head's states [sequences, width] there; without
        meaning unless they are to be kept."""
        head = self._head
        head.lm_head.idle = not keep
        try:
            with head.model.embed_tokens.after(states):
                rows = [found for found in self._runner.compute(batch) if found is not None]
        finally:
            head.lm_head.idle = False
        given = head.lm_head.given[0]
        head.lm_head.given = None
        return (torch.cat(rows) if rows else states[:0]), given[: len(batch)]
