"""Speculative decoding: a draft model proposes tokens, and the model verifies several of them in one forward.

It pays where weights are streamed: verifying four tokens takes one pass over the weights, as one token does.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bigmodel.server.engine.compute.host_linear import HostLinear
from bigmodel.server.engine.compute.runner import PackedRunner, PackedTokens
from bigmodel.server.engine.kv.buffers import SequenceKV, round_up
from bigmodel.server.engine.sampling.sampler import likeliest
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

_PREFILL = 512  # tokens of a prompt that the draft model computes in one step


class Drafter(Protocol):
    """Proposes tokens for running sequences."""

    def propose(self, sequences: Seq[Sequence]) -> None:
        """Set ``draft`` of each sequence to tokens that may follow it, or to none.

        When it raises, the drafts are of no use, and nothing is remembered of any sequence.
        """
        ...

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of the draft model's keys and values per position, by device."""
        ...

    def watching(self, batch: Seq[ScheduledTokens]) -> AbstractContextManager[None]:
        """A context within which the model computes ``batch``, for those that propose by what it computes."""
        ...


@dataclass
class _DraftState:
    """The draft model's keys and values of one sequence: ``computed`` tokens of it, then the ``proposed`` ones."""

    kv: SequenceKV = field(default_factory=SequenceKV)
    computed: int = 0
    proposed: list[int] = field(default_factory=list)


class ModelDrafter:
    """Proposes up to ``count`` tokens for each sequence with ``model``, which must have the same vocabulary.

    ``max_length`` is the model's context, in tokens: nothing is proposed for sequences that exceed it.
    """

    def __init__(
        self, model: torch.nn.Module, count: int, *, max_length: int, host_linear: HostLinear = "auto"
    ) -> None:
        self.count = count
        self.max_length = max_length
        self._runner = PackedRunner(model, row_multiple=1, host_linear=host_linear)
        self._states: dict[int, _DraftState] = {}

    def bytes_per_token(self) -> dict[str, int]:
        """See :meth:`Drafter.bytes_per_token`."""
        return self._runner.bytes_per_token()

    def watching(self, batch: Seq[ScheduledTokens]) -> AbstractContextManager[None]:
        """See :meth:`Drafter.watching`."""
        return nullcontext()

    def propose(self, sequences: Seq[Sequence]) -> None:
        """See :meth:`Drafter.propose`."""
        self._states = {s.order: self._states.get(s.order, _DraftState()) for s in sequences}
        try:
            self._propose(sequences)
        except BaseException:
            self._states = {}  # they count tokens whose keys and values may not have been computed
            raise

    def _propose(self, sequences: Seq[Sequence]) -> None:
        ready = [s for s in sequences if self._discard_rejected(s)]
        if not ready:
            return
        tokens = self._read([(s, self._unread(s)) for s in ready])
        caught = [(s, t) for s, t in zip(ready, tokens, strict=True) if self._states[s.order].computed == len(s)]
        for sequence, token in caught:
            sequence.draft.append(token)
        for _ in range(self.count - 1):
            going = [s for s, _ in caught if len(s.draft) < self._max_proposals(s)]
            if not going:
                break
            for sequence, token in zip(going, self._read([(s, s.draft[-1:]) for s in going]), strict=True):
                sequence.draft.append(token)

    def _discard_rejected(self, sequence: Sequence) -> bool:
        """Discard rejected proposals; return whether another one is useful."""
        sequence.draft = []
        state = self._states[sequence.order]
        for token in state.proposed:
            if sequence.token_slice(state.computed, state.computed + 1) != [token]:
                break
            state.computed += 1
        state.proposed = []
        return self._max_proposals(sequence) > 0

    def _max_proposals(self, sequence: Sequence) -> int:
        """Return the number of useful proposals: the model itself samples the token after the last one."""
        wanted = sequence.params.max_tokens - len(sequence.output) - 1
        return min(self.count, wanted, self.max_length + 1 - len(sequence))

    def _unread(self, sequence: Sequence) -> list[int]:
        start = self._states[sequence.order].computed
        return sequence.token_slice(start, min(len(sequence), start + _PREFILL))

    def _read(self, items: Seq[tuple[Sequence, list[int]]]) -> list[int]:
        """Compute tokens with the draft model; the likeliest token after each entry."""
        batch = []
        for sequence, tokens in items:
            state = self._states[sequence.order]
            start = state.computed + len(state.proposed)
            state.kv.reserve(round_up(start + len(tokens)))
            batch.append(PackedTokens(state.kv, tokens, start, start + len(tokens), 1))
            if sequence.draft:
                state.proposed += tokens
            else:
                state.computed += len(tokens)
        logits = [rows for rows in self._runner.compute(batch) if rows is not None]
        # Any token will do where logits are not numbers: proposals are verified.
        return [token or 0 for token in likeliest(torch.cat(logits))]
