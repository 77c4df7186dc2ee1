"""Guessing the next tokens with a small model, so that the large one can check several in one forward.

What pays is the weights' way to the processor: checking four guesses costs one pass over them, as one token does.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bigmodel.server.engine.cache import SequenceKV, round_up
from bigmodel.server.engine.host_linear import HostLinear
from bigmodel.server.engine.packed import PackedRunner, Rows
from bigmodel.server.engine.request import Sequence
from bigmodel.server.engine.sampler import likeliest

_CATCH_UP = 512  # tokens of a prompt that the small model reads in one go


class Drafter(Protocol):
    """``propose`` sets ``draft`` of each sequence to tokens that may follow it (or to none)."""

    def propose(self, sequences: Seq[Sequence]) -> None: ...

    def bytes_per_token(self) -> dict[str, int]: ...


@dataclass
class _Reader:
    """How far the small model has read one sequence: ``computed`` tokens of it, then the ``guesses`` it made."""

    kv: SequenceKV = field(default_factory=SequenceKV)
    computed: int = 0
    guesses: list[int] = field(default_factory=list)


class ModelDrafter:
    """Guesses ``count`` tokens for each sequence with ``model``, which must have the same vocabulary."""

    def __init__(self, model: torch.nn.Module, count: int, *, host_linear: HostLinear = "auto") -> None:
        self.count = count
        self._runner = PackedRunner(model, row_multiple=1, host_linear=host_linear)
        self._readers: dict[int, _Reader] = {}

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes that its own keys and values take for each token of a sequence."""
        return self._runner.bytes_per_token()

    def propose(self, sequences: Seq[Sequence]) -> None:
        self._readers = {s.order: self._readers.get(s.order, _Reader()) for s in sequences}
        ready = [s for s in sequences if self._catch_up_portion(s)]
        if not ready:
            return
        tokens = self._read([(s, self._unread(s)) for s in ready])
        caught = [(s, t) for s, t in zip(ready, tokens, strict=True) if self._readers[s.order].computed == len(s)]
        for sequence, token in caught:
            sequence.draft.append(token)
        for _ in range(self.count - 1):
            going = [s for s, _ in caught if len(s.draft) < self._room(s)]
            if not going:
                break
            for sequence, token in zip(going, self._read([(s, s.draft[-1:]) for s in going]), strict=True):
                sequence.draft.append(token)

    def _catch_up_portion(self, sequence: Sequence) -> bool:
        """Forget wrong guesses; whether a guess is of use at all."""
        sequence.draft = []
        reader = self._readers[sequence.order]
        for guess in reader.guesses:
            if sequence.token_slice(reader.computed, reader.computed + 1) != [guess]:
                break
            reader.computed += 1
        reader.guesses = []
        return self._room(sequence) > 0

    def _room(self, sequence: Sequence) -> int:
        """Guesses of use: the token after the last guess is chosen anyway."""
        return min(self.count, sequence.params.max_tokens - len(sequence.output) - 1)

    def _unread(self, sequence: Sequence) -> list[int]:
        start = self._readers[sequence.order].computed
        return sequence.token_slice(start, min(len(sequence), start + _CATCH_UP))

    def _read(self, items: Seq[tuple[Sequence, list[int]]]) -> list[int]:
        """Feed tokens to the small model; the likeliest token after each."""
        batch = []
        for sequence, tokens in items:
            reader = self._readers[sequence.order]
            start = reader.computed + len(reader.guesses)
            reader.kv.reserve(round_up(start + len(tokens)))
            batch.append(Rows(reader.kv, tokens, start, start + len(tokens), 1))
            if sequence.draft:
                reader.guesses += tokens
            else:
                reader.computed += len(tokens)
        logits = [rows for rows in self._runner.compute(batch) if rows is not None]
        # Where the small model has no numbers any guess will do: the large one checks it.
        return [token or 0 for token in likeliest(torch.cat(logits))]
