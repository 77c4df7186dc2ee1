"""One forward per step for the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from bigmodel.server.engine.attention import NAME, ragged_step, register
from bigmodel.server.engine.cache import RaggedCache, SequenceKV, Span
from bigmodel.server.engine.host_linear import HostLinear, choose_host_linear, computing_with, linear_of
from bigmodel.server.engine.invariance import probe_row_multiple
from bigmodel.server.engine.runner import input_device, readable, wants_all
from bigmodel.server.engine.scheduler import Grant


@dataclass(frozen=True)
class Rows:
    """``tokens`` of one sequence from position ``start`` on; logits of the last ``keep`` of them are wanted."""

    kv: SequenceKV
    tokens: list[int]
    start: int
    prompt_length: int
    keep: int


def _rows(grant: Grant) -> Rows:
    sequence, start = grant.sequence, grant.sequence.computed
    assert sequence.kv is not None
    tokens = [*sequence.token_slice(start, start + grant.tokens), *grant.draft]
    keep = len(tokens) if wants_all(grant) else (1 + len(grant.draft)) * grant.samples
    return Rows(sequence.kv, tokens, start, sequence.prompt_length, keep)


class PackedRunner:
    """Packs the new tokens of every sequence into one row and computes them in one forward.

    ``row_multiple``: the packed row is padded to a multiple of so many tokens, with which the matrix
    multiplications of this machine give a row the same bits whatever the other rows are. "auto" measures it.
    ``host_linear``: see :mod:`bigmodel.server.engine.host_linear`.
    """

    name = "packed"

    def __init__(
        self, model: torch.nn.Module, *, row_multiple: int | str = "auto", host_linear: HostLinear = "auto"
    ) -> None:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        self.model = model
        self.device = input_device(model)
        self.host_linear = choose_host_linear(host_linear)
        if row_multiple == "auto":
            row_multiple = probe_row_multiple(model, self.device, linear_of(self.host_linear))
        self.row_multiple = int(row_multiple)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]:
        return self.compute([_rows(grant) for grant in grants])

    def compute(self, batch: Seq[Rows]) -> list[torch.Tensor | None]:
        """Logits [kept, vocabulary] of each entry of a packed batch, None where none are kept."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for rows in batch:
            end = rows.start + len(rows.tokens)
            spans.append(Span(rows.kv, len(tokens), rows.start, end, rows.prompt_length))
            tokens += rows.tokens
            positions += range(rows.start, end)
            keep += range(len(tokens) - rows.keep, len(tokens))
        logits = self._forward(tokens, positions, RaggedCache(spans), keep)
        shares = logits.split([rows.keep for rows in batch])
        return [share if rows.keep else None for rows, share in zip(batch, shares, strict=True)]

    def _forward(self, tokens: list[int], positions: list[int], cache: RaggedCache, keep: list[int]) -> torch.Tensor:
        pad = -len(tokens) % self.row_multiple
        rows = keep + [0] * (max(1, -(-len(keep) // self.row_multiple)) * self.row_multiple - len(keep))
        extra = {"logits_to_keep": torch.tensor(rows, device=self.device)} if self._keeps_rows else {}
        with torch.inference_mode(), ragged_step(cache), computing_with(self.host_linear):
            logits: torch.Tensor = self.model(
                input_ids=torch.tensor([tokens + [0] * pad], device=self.device),
                position_ids=torch.tensor([positions + [0] * pad], device=self.device),
                past_key_values=cache,
                use_cache=True,
                **extra,
            ).logits[0]
        if not self._keeps_rows:
            logits = logits[rows]
        return readable(logits[: len(keep)])

    def last_logits(self, prompts: Seq[list[int]]) -> tuple[list[torch.Tensor], int]:
        """The logits [vocabulary] after each of ``prompts``, all computed in one forward.

        Also the number of layers that stored keys and values and attended to them here.
        """
        tokens: list[int] = []
        spans: list[Span] = []
        for prompt in prompts:
            kv = SequenceKV()
            kv.reserve(len(prompt))
            spans.append(Span(kv, len(tokens), 0, len(prompt), len(prompt)))
            tokens += prompt
        positions = [position for prompt in prompts for position in range(len(prompt))]
        ends = [span.row + span.end - 1 for span in spans]
        cache = RaggedCache(spans)
        logits = list(self._forward(tokens, positions, cache, ends))
        return logits, len(cache.attended)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position on each device, learnt from a forward of one token."""
        kv = SequenceKV()
        kv.reserve(1)
        self._forward([0], [0], RaggedCache([Span(kv, 0, 0, 1, 1)]), [0])
        total: dict[str, int] = {}
        for layer in kv.layers():
            for tensor in kv.layer(layer):
                key = str(tensor.device)
                total[key] = total.get(key, 0) + tensor.nbytes // tensor.shape[1]
        return total
