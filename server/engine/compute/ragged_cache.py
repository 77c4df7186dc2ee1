"""What one packed step attends to: the calls of its sequences, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import DynamicCache

from bigmodel.devices import HOST
from bigmodel.server.engine.compute.varlen import PagedStep, parts_of_lengths
from bigmodel.server.engine.kv.arena import PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV
from bigmodel.server.engine.kv.reading import Attended, Reading

_NOWHERE = torch.tensor([-1])
"""A position that has no page yet."""


@dataclass(frozen=True)
class Span:
    """Packed rows from ``row`` on: positions ``start`` to ``end`` of a sequence whose prompt has ``prompt_length``."""

    kv: SequenceKV
    row: int
    start: int
    end: int
    prompt_length: int


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: packed rows from ``row`` on are positions ``start`` to ``end`` of ``kv``.

    ``generated`` tells a token behind the prompt from a part of the prompt.
    """

    kv: SequenceKV
    row: int
    start: int
    end: int
    generated: bool = False

    def first(self, window: int | None) -> int:
        """The first position that the call attends to."""
        return 0 if window is None else max(0, self.start - window + 1)


class RaggedCache(DynamicCache):
    """The cache handed to the model for one packed step; writes go to each sequence's own buffers.

    Attributes:
        counts_tokens: Whether positions follow from the tokens in it: layers of other stages (`PassedLayer`) add none.
    """

    counts_tokens = False

    def __init__(self, spans: Seq[Span]) -> None:
        super().__init__()
        self.offloading = True  # a dispatched model leaves it as it is: where keys and values lie is the arena's
        self.spans = spans
        self.calls: list[AttentionCall] = []
        self.attended: set[int] = set()  # layers that attended through this cache
        self.mixed: set[int] = set()  # layers with a recurrent state that computed through it
        self.by_call = False  # whether an accelerator attended call by call, with memory for each row and position
        self.updated = 0  # the layer whose keys and values were stored last
        for span in spans:
            for start, end in split_positions(span.start, span.end, span.prompt_length):
                row, generated = span.row + start - span.start, start >= span.prompt_length
                self.calls.append(AttentionCall(span.kv, row, start, end, generated))

        arenas = {span.kv.arena if isinstance(span.kv, PagedKV) else None for span in spans}
        self.arena = arenas.pop() if len(arenas) == 1 else None  # where all sequences have their pages
        self._span_of = {id(span.kv): span for span in spans}
        self._steps: dict[tuple[torch.device, int | None], PagedStep] = {}
        self._ahead: dict[int | None, Reading | None] = {}

    def step(self, device: torch.device, window: int | None) -> PagedStep:
        """Return this step's positions in the arena, for layers on ``device`` with a window."""
        found = self._steps.get((device, window))
        if found is None:
            written = [_paged(span.kv).rows(span.start, span.end) for span in self.spans]
            attended = [self._attended(call, window) for call in self.calls]
            rows = [call.end - call.start for call in self.calls]
            assert self.arena is not None
            most = self.arena.positions
            found = self._steps[device, window] = PagedStep.of(written, attended, rows, device, most)
        return found

    def readings(self, device: torch.device, window: int | None) -> Seq[Reading]:
        """See `StepReadings.readings`."""
        return self.step(device, window).readings

    def ahead(self, window: int | None) -> Reading | None:
        """See `StepReadings.ahead`: each text is expected to get one token, unless prompts or drafts are computed."""
        if window not in self._ahead:
            self._ahead[window] = self._next(window)
        return self._ahead[window]

    def _next(self, window: int | None) -> Reading | None:
        assert self.arena is not None
        attended = []
        for row, span in enumerate(self.spans):
            if span.end < span.prompt_length or span.end - max(span.start, span.prompt_length) > 1:
                return None
            first = AttentionCall(span.kv, row, span.end, span.end + 1).first(window)
            rows = _paged(span.kv).rows(first, span.end)
            attended.append(Attended(torch.cat([rows, _NOWHERE]), 1, row))
        most = self.arena.positions
        found = Reading.of(attended[parts_of_lengths([len(each.positions) for each in attended], most)[0]])
        return found if len(found.rows) <= most else None

    def _attended(self, call: AttentionCall, window: int | None) -> Attended:
        span, first = self._span_of[id(call.kv)], call.first(window)
        begin = min(max(first, span.start), call.end)  # of what this step computes
        return Attended(_paged(call.kv).rows(first, call.end), call.end - begin, span.row + begin - span.start)

    def begin(self) -> None:
        """Start fetching keys and values from the host, if there are any."""
        if self.arena is not None and self.arena.host is not None:
            spans = [(_paged(span.kv), span.start, span.end) for span in self.spans]
            written = torch.cat([kv.rows(start, end) for kv, start, end in spans])
            read = torch.cat([kv.numbers(end) for kv, _, end in spans])
            self.arena.host.begin(written, read, self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the packed keys and values [1, heads, tokens, dim] of layer ``layer_idx``; returned unchanged."""
        self.updated = layer_idx
        if self.arena is not None:
            step = self.step(key_states.device, None)
            key, value = (states[0, :, : len(step.stored)].transpose(0, 1) for states in (key_states, value_states))
            host = self.arena.on_host(layer_idx)
            if host is None or key.device.type == HOST:
                self.arena.write(layer_idx, step.written, key, value)
            else:
                host.store(layer_idx, step.stored, key, value)
            return key_states, value_states
        with torch._C.DisableTorchFunction():  # as in `ragged_attention`: many small calls
            for span in self.spans:
                rows = slice(span.row, span.row + span.end - span.start)
                span.kv.write(layer_idx, span.start, key_states[0, :, rows], value_states[0, :, rows])
        return key_states, value_states

    @cached_property
    def turns(self) -> list[list[AttentionCall]]:
        """The calls in turns, of each sequence one: what is computed in one after the other, as each needs the state
        that the one before leaves."""
        turns: list[list[AttentionCall]] = []
        made: dict[int, int] = {}
        for call in self.calls:
            number = made.get(id(call.kv), 0)
            made[id(call.kv)] = number + 1
            if number == len(turns):
                turns.append([])
            turns[number].append(call)
        return turns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given to the model explicitly."""
        return 0


def split_positions(start: int, end: int, prompt_length: int) -> Iterator[tuple[int, int]]:
    """Cut positions ``start`` to ``end`` into attention calls: prompt blocks, then single positions."""
    while start < min(end, prompt_length):
        stop = min((start // PROMPT_BLOCK + 1) * PROMPT_BLOCK, prompt_length, end)
        yield start, stop
        start = stop
    for position in range(start, end):
        yield position, position + 1


def _paged(kv: SequenceKV) -> PagedKV:
    assert isinstance(kv, PagedKV)
    return kv
