"""Runners compute one step: scheduled tokens in, logits out. The protocol, and the runner of packed batches.

:class:`PackedRunner` computes the new tokens of every sequence in one forward, so one pass over the weights serves the
whole batch. :class:`.plain.PlainRunner` computes sequence by sequence, for models whose attention cannot be replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import DynamicCache

from bigmodel.devices import HOST
from bigmodel.devices.pinned import on_device
from bigmodel.server.adapters.rows import Adapters, Rows
from bigmodel.server.engine.compute.attention import NAME, RaggedCache, Span, ragged_step, register
from bigmodel.server.engine.compute.head_in_parts import head_in_parts
from bigmodel.server.engine.compute.hidden import taking_states
from bigmodel.server.engine.compute.host_linear import (
    HostLinear,
    OneDnnLinear,
    choose_host_linear,
    give_contiguous,
    linear_of,
    probe_row_multiple,
)
from bigmodel.server.engine.compute.mixers import KnownMixers, Mixers, find_mixers
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV
from bigmodel.server.engine.kv.layer_state import StateBytes
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

CACHE_NAMES = ("past_key_values", "cache_params")
"""What models call the cache among the arguments of their forward."""


if TYPE_CHECKING:
    from bigmodel.dispatch.streaming.host_kv import KVFetchers


class Runner(Protocol):
    """Computes steps; ``row_multiple`` and ``host_linear`` say how (see :mod:`.host_linear`).

    ``adapters`` are added to the rows of sequences that ask for one.
    """

    name: str
    row_multiple: int
    host_linear: HostLinear
    adapters: Adapters | None

    def run(self, batch: Seq[ScheduledTokens]) -> list[torch.Tensor | None]:
        """Logits of each entry: [tokens, vocabulary], or None where the step does not reach the sequence's end.

        Rows are those of the last token and of its draft; of all tokens where ``all_logits`` is set. Sequences that
        are pooled have states [tokens, width] in their place, as many as ``pooled_rows``.
        """
        ...

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position, by device."""
        ...

    def probe(self) -> None:
        """Compute a token that no sequence has. Raises what the model raises, if it is broken."""
        ...


def input_device(model: torch.nn.Module) -> torch.device:
    """Device of the model's input tokens: the main device of a dispatched model, else that of its weights."""
    if not hasattr(model, "hf_device_map"):
        device: torch.device = model.device  # type: ignore[assignment]
        return device
    from bigmodel.dispatch.attach.dispatched import dispatched

    found = dispatched(model)
    assert found is not None
    return found.main_device


def kept_on_host(model: torch.nn.Module) -> KVFetchers | None:
    """Where a dispatched model keeps keys and values on the host; None if it keeps none there."""
    if not hasattr(model, "hf_device_map"):
        return None
    from bigmodel.dispatch.attach.dispatched import dispatched

    found = dispatched(model)
    return None if found is None else found.kv


def readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits where tokens can be sampled: left on CUDA and on virtual accelerators, which stand in for it; copied to
    the host from any other accelerator."""
    return logits if logits.device.type in ("cpu", "cuda", "virtual") else logits.cpu()


@dataclass(frozen=True)
class PackedTokens:
    """``tokens`` of one sequence from position ``start`` on.

    Logits of the last ``keep`` of them are wanted, or their states where it is ``pooled``. ``adapter`` names the LoRA
    adapter that computes them; "": none.
    """

    kv: SequenceKV
    tokens: list[int]
    start: int
    prompt_length: int
    keep: int
    pooled: bool = False
    adapter: str = ""


def _packed_tokens(scheduled: ScheduledTokens) -> PackedTokens:
    sequence, start = scheduled.sequence, scheduled.sequence.computed
    assert sequence.kv is not None
    tokens = [*sequence.token_slice(start, start + scheduled.tokens), *scheduled.draft]
    pooled = scheduled.pooled_rows
    keep = len(tokens) if scheduled.all_logits else (1 + len(scheduled.draft)) * scheduled.samples
    keep = keep if pooled is None else pooled
    adapter = sequence.request.adapter
    return PackedTokens(sequence.kv, tokens, start, sequence.prompt_length, keep, pooled is not None, adapter)


class PackedRunner:
    """Packs the new tokens of every sequence into one row and computes them in one forward.

    ``row_multiple``: the packed row is padded to a multiple of so many tokens, with which the matrix
    multiplications of this machine give a row the same bits beside any other rows. "auto" measures it.
    ``host_linear``: see :mod:`bigmodel.server.engine.compute.host_linear`. ``layers``: that property of an earlier
    runner of the same model, placed in the same way; None: a forward of one token measures it. ``mixers``: what that
    runner found out about modules with recurrent states; None: they are looked for.

    Attributes:
        by_call: Whether an accelerator has attended call by call: that takes memory for each row and position.
        logits_at_once: Rows whose logits an accelerator has memory for; None: any number.
    """

    name = "packed"

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        row_multiple: int | str = "auto",
        host_linear: HostLinear = "auto",
        layers: tuple[tuple[str, int], ...] | None = None,
        mixers: KnownMixers | None = None,
        by_call: bool = False,
    ) -> None:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        self.model = model
        self.device = input_device(model)
        self.host_linear = choose_host_linear(host_linear)
        if row_multiple == "auto":
            row_multiple = probe_row_multiple(model, self.device, linear_of(self.host_linear))
        self.row_multiple = int(row_multiple)
        self.by_call = by_call
        self.logits_at_once: int | None = None
        give_contiguous(model)
        self.adapters: Adapters | None = None
        if layers is not None:
            self.layers = layers  # in the place of the property's value
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
        known = KnownMixers(find_mixers(model, self._token)) if mixers is None else mixers
        self.mixers = Mixers(model, known) if known.modules else None
        if known.states is not None:
            self.states = known.states  # in the place of the property's value, too

    def run(self, batch: Seq[ScheduledTokens]) -> list[torch.Tensor | None]:
        """See :meth:`Runner.run`."""
        step = [_packed_tokens(scheduled) for scheduled in batch]
        if self.mixers is None:
            return self.compute(step)
        for packed, scheduled in zip(step, batch, strict=True):
            if packed.start and not packed.kv.states:  # an earlier step failed
                self._compute_again(packed, scheduled.sequence.token_slice(0, packed.start))
        try:
            return self.compute(step)
        except BaseException:
            for packed in step:  # some layers' are those of after this step
                packed.kv.states = {}
            raise

    def _compute_again(self, packed: PackedTokens, tokens: list[int]) -> None:
        """Compute the tokens before ``packed``, block by block, for the states that they lead to."""
        for start in range(0, len(tokens), PROMPT_BLOCK):
            block = tokens[start : start + PROMPT_BLOCK]
            self.compute([PackedTokens(packed.kv, block, start, packed.prompt_length, 0, adapter=packed.adapter)])

    def compute(self, batch: Seq[PackedTokens]) -> list[torch.Tensor | None]:
        """Logits [keep, vocabulary] of each entry of a packed batch, or states; None where none are kept."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        pooled: list[int] = []
        adapted: list[Rows] = []
        for packed in batch:
            end = packed.start + len(packed.tokens)
            spans.append(Span(packed.kv, len(tokens), packed.start, end, packed.prompt_length))
            adapted.append(Rows(packed.adapter, len(tokens), len(tokens) + len(packed.tokens)))
            tokens += packed.tokens
            positions += range(packed.start, end)
            (pooled if packed.pooled else keep).extend(range(len(tokens) - packed.keep, len(tokens)))
        with nullcontext() if self.adapters is None else self.adapters.step(adapted):
            logits, states = self._forward_with_states(tokens, positions, RaggedCache(spans), keep, pooled)
        rows = iter(logits.split([packed.keep for packed in batch if not packed.pooled]))
        vectors = iter(() if states is None else states.split([packed.keep for packed in batch if packed.pooled]))
        found = [next(vectors, None) if packed.pooled else next(rows) for packed in batch]
        return [own if packed.keep else None for packed, own in zip(batch, found, strict=True)]

    def _forward_with_states(
        self, tokens: list[int], positions: list[int], cache: RaggedCache, keep: list[int], pooled: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the rows ``keep``, and states of the rows ``pooled``; None if there are none of these."""
        if not pooled:
            return self._forward(tokens, positions, cache, keep), None
        given = [*keep, *pooled]
        seen = list(range(len(given))) if self._keeps_rows else given
        passed = seen[: len(keep)]
        passed += [0] * (max(1, -(-len(keep) // self.row_multiple)) * self.row_multiple - len(keep))
        with taking_states(self.model, seen[len(keep) :], passed) as taken:
            logits = self._forward(tokens, positions, cache, given, selected=True)
        return logits[: len(keep)], readable(taken.states)

    def _forward(
        self, tokens: list[int], positions: list[int], cache: RaggedCache, keep: list[int], *, selected: bool = False
    ) -> torch.Tensor:
        """Logits of the rows ``keep``; all that the output layer gives where it is ``selected`` what it is given."""
        pad = [0] * (-len(tokens) % self.row_multiple)
        rows = keep + [0] * (max(1, -(-len(keep) // self.row_multiple)) * self.row_multiple - len(keep))
        inputs = torch.tensor([*tokens, *pad, *positions, *pad, *rows])  # one transfer for all three
        if self.device.type != HOST:
            inputs = on_device(inputs, self.device)
        padded = len(tokens) + len(pad)
        ids, places, kept = inputs.split([padded, padded, len(rows)])
        extra = {"logits_to_keep": kept} if self._keeps_rows else {}
        library = OneDnnLinear() if self.host_linear == "onednn" else nullcontext()
        extra |= {"position_ids": places[None]} if self._takes_positions else {}
        with torch.inference_mode(), ragged_step(cache), library, self._head(len(keep)):
            logits: torch.Tensor = self.model(
                input_ids=ids[None], use_cache=True, **{self._cache_name: cache}, **extra
            ).logits[0]
        self.by_call = self.by_call or cache.by_call
        if selected:
            return readable(logits)
        if not self._keeps_rows:
            logits = logits[rows]
        return readable(logits[: len(keep)])

    def _head(self, rows: int) -> AbstractContextManager[None]:
        """The context in which the output layer computes so many rows: in parts where memory for all is not planned."""
        most = self.logits_at_once
        if most is None or rows <= most or self.device.type == HOST or not self._keeps_rows:
            return nullcontext()
        # Parts are padded as packed rows are, so that each row has the bits that it has alone.
        return head_in_parts(self.model, max(1, most // self.row_multiple) * self.row_multiple)

    def last_logits(self, prompts: Seq[list[int]]) -> tuple[list[torch.Tensor], int]:
        """Logits [vocabulary] after each prompt, from one forward, and the number of layers that were computed here."""
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
        return logits, len(cache.attended | cache.mixed)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position, by device."""
        total: dict[str, int] = {}
        for device, nbytes in self.layers:
            total[device] = total.get(device, 0) + nbytes
        for device in self.states.total:
            total.setdefault(device, 0)
        return total

    def gathered_per_token(self) -> dict[str, int]:
        """Bytes per position of the largest layer, by accelerator: attention gathers those of one layer from pages."""
        largest: dict[str, int] = {}
        for device, nbytes in self.layers:
            if torch.device(device).type != "cpu":
                largest[device] = max(largest.get(device, 0), nbytes)
        return largest

    @cached_property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """Device and bytes per position of the keys and values of each layer; measured by a forward of one token."""
        kv, kept = self._computed(), kept_on_host(self.model)
        on_host = set() if kept is None else kept.layers
        held = ((index, *kv.layer(index)) for index in kv.layers())
        return tuple(
            (HOST if index in on_host else str(keys.device), (keys.nbytes + values.nbytes) // keys.shape[1])
            for index, keys, values in held
        )

    @cached_property
    def states(self) -> StateBytes:
        """Bytes of a sequence's recurrent states; measured by a forward of one token."""
        return StateBytes.of(self._computed().states if self.mixers else {})

    def probe(self) -> None:
        """See :meth:`Runner.probe`."""
        self._computed()

    def _token(self, cache: DynamicCache) -> None:
        """Compute a token with the model's own forward."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache})

    def _computed(self) -> SequenceKV:
        """Keys and values of one token."""
        kv = SequenceKV()
        kv.reserve(1)
        self._forward([0], [0], RaggedCache([Span(kv, 0, 0, 1, 1)]), [0])
        return kv
