"""Attention over a ragged batch: every sequence attends to its own keys and values only.

A step packs the new tokens of all its sequences into one row ``[1, tokens]``. Everything in a transformer except
attention works token by token, so one forward serves them all; attention runs sequence by sequence, without padding.

The shapes of every attention call depend on the sequence alone: prompt tokens are attended in blocks of
:data:`~bigmodel.server.engine.kv.buffers.PROMPT_BLOCK` positions counted from the start of the prompt, generated tokens
one at a time. So no bit of the result depends on the rest of the batch, on how a prompt was cut into chunks, or on
whether a sequence was preempted and recomputed. `RaggedCache` knows the calls of one step, and where their keys and
values lie.

On accelerators keys and values are in pages of one arena. There all calls of a layer are one call of
:mod:`.varlen`'s kernel, where the device has one that keeps that promise; the loop over the calls is its twin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from bigmodel.devices import HOST
from bigmodel.server.engine.compute.varlen import Kernel, PagedCalls, PagedStep, batched_kernel, parts_of_lengths
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV
from bigmodel.server.engine.kv.reading import Attended, Reading

NAME = "bigmodel_ragged"

PART_ROWS = PROMPT_BLOCK // 2
"""Tokens of a prompt whose scores and mask an accelerator has memory for at once. A step is planned with more rows than
a block has; but its mask is counted for those of one sequence alone."""

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


_active = threading.local()


def active_cache() -> RaggedCache | None:
    """The cache of the packed step that this thread computes."""
    return getattr(_active, "cache", None)


@contextmanager
def ragged_step(cache: RaggedCache) -> Iterator[None]:
    """Make forwards of this thread attend through ``cache`` inside the context."""
    _active.cache = cache
    try:
        cache.begin()
        yield
    finally:
        _active.cache = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    offset: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of consecutive positions of one sequence.

    Query heads that share a key-value head become rows of one matrix, so keys and values are never repeated in memory.
    On accelerators, where scores and a mask of all these rows take memory, those of a prompt attend in parts that take
    no more than was planned.

    Args:
        query: [heads, tokens, dim]; token t is at position ``offset + t`` of the keys given.
        key: [key-value heads, positions, dim].
        value: [key-value heads, positions, value dim].
        offset: Position of the first query token among the keys.
        scale: Factor of the scores; None for ``dim ** -0.5``.
        window: Positions that a token attends to, its own included; None for all before it.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: Logits [heads] that take part in the softmax and have no value.

    Returns:
        [tokens, heads, value dim].
    """
    heads, tokens, dim = query.shape
    groups = heads // key.shape[0]
    mask = None
    if tokens > 1 or softcap is not None or sinks is not None:
        if softcap is None and sinks is None and query.device.type != HOST:
            return _in_parts(query, key, value, offset, window, scale)
        mask = _causal_mask(tokens, key.shape[1], offset, window, query.device).repeat(groups, 1)
    packed = query.reshape(key.shape[0], groups * tokens, dim)
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            packed[None], key[None], value[None], attn_mask=mask, scale=scale
        )[0]
    else:
        assert mask is not None
        out = _plain_attention(packed, key, value, mask, scale, softcap, sinks, groups)
    return out.reshape(heads, tokens, value.shape[-1]).transpose(0, 1)


def _in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of `attend`: `PART_ROWS` tokens at a time, and of these one query head of each group after the other.

    Plans count so many heads at a time, of all rows of a step.
    """
    by_group = query.unflatten(0, (key.shape[0], -1))
    out = query.new_empty(query.shape[1], *by_group.shape[:2], value.shape[-1])
    for begin in range(0, query.shape[1], PART_ROWS):
        rows = slice(begin, min(begin + PART_ROWS, query.shape[1]))
        mask = _causal_mask(rows.stop - begin, key.shape[1], offset + begin, window, query.device)
        for number in range(by_group.shape[1]):
            heads = functional.scaled_dot_product_attention(
                by_group[:, number, rows][None], key[None], value[None], attn_mask=mask, scale=scale
            )
            out[rows, :, number] = heads[0].transpose(0, 1)
            del heads
        del mask
    return out.flatten(1, 2)


def _causal_mask(tokens: int, positions: int, offset: int, window: int | None, device: torch.device) -> torch.Tensor:
    at = torch.arange(offset, offset + tokens, device=device)[:, None]
    seen = torch.arange(positions, device=device)[None, :]
    mask = seen <= at
    if window is not None:
        mask &= seen > at - window
    return mask


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    groups: int,
) -> torch.Tensor:
    """Unfused attention, for soft-capped scores and attention sinks, which the fused kernel lacks."""
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
    rows = scores.shape[1] // groups
    sink = sinks.reshape(key.shape[0], groups, 1).repeat_interleave(rows, dim=1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(query.dtype) @ value


@contextmanager
def attending_in_parts() -> Iterator[None]:
    """Have forwards of this thread outside a step attend with `PART_ROWS` tokens at a time on accelerators."""
    _active.in_parts = True
    try:
        yield
    finally:
        _active.in_parts = False


def _plain_in_parts(
    plain: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention [1, tokens, heads, dim] by calls of ``plain`` for `PART_ROWS` tokens each."""
    tokens, positions = query.shape[2], key.shape[2]
    found = []
    for begin in range(0, tokens, PART_ROWS):
        end = min(begin + PART_ROWS, tokens)
        if attention_mask is None:
            mask = _causal_mask(end - begin, positions, positions - tokens + begin, None, query.device)[None, None]
        else:
            mask = attention_mask[:, :, begin:end]
        found.append(plain(query[:, :, begin:end], key, value, mask)[0])
    return torch.cat(found, dim=1)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function registered with transformers under :data:`NAME`.

    ``query`` [1, heads, tokens, dim] is the packed step. Outside :func:`ragged_step` this is transformers' own
    scaled-dot-product attention, so the model works as before.
    """
    cache = active_cache()
    if cache is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: Callable[..., Any] = partial(sdpa_attention_forward, module, scaling=scaling, **kwargs)
        in_parts = getattr(_active, "in_parts", False) and getattr(module, "is_causal", True)
        if not in_parts or query.device.type == HOST:
            return plain(query, key, value, attention_mask)
        return _plain_in_parts(plain, query, key, value, attention_mask), None
    own = getattr(module, "layer_idx", None)
    # None or -1: several layers share the module, as in Zamba: it is called for the one that it has just stored
    layer = cache.updated if own is None or int(own) < 0 else int(own)
    cache.attended.add(layer)
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    expand = getattr(module, "expand_kv", None)
    if query.device.type != HOST:
        cache.by_call = cache.by_call or expand is not None or _kernel(query[0], key[0], value[0], options) is None
    if expand is not None:
        return _expanded(cache, layer, query, value, options, expand)[None], None
    # Many small calls, none of them a linear layer: function modes (see host_linear) need not see them.
    with torch._C.DisableTorchFunction():
        if cache.arena is None:
            out = _by_sequence(cache, layer, query, value, options)
        else:
            out = _in_pages(cache, cache.arena, layer, query, value, options)
    return out[None], None


def _by_sequence(
    cache: RaggedCache, layer: int, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attention [tokens, heads, dim] of a step whose sequences have buffers of their own."""
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for call in cache.calls:
        first, rows = call.first(options["window"]), slice(call.row, call.row + call.end - call.start)
        keys, values = call.kv.span(layer, first, call.end)
        out[rows] = attend(query[0, :, rows], keys, values, offset=call.start - first, **options)
    return out


def _expanded(
    cache: RaggedCache,
    layer: int,
    query: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention [tokens, heads, dim] of a layer that caches latents, of which it makes keys and values (MLA).

    Those of each call are made anew, with as many rows alone and in a batch: so they have the same bits.
    """
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for call in cache.calls:
        first, rows = call.first(options["window"]), slice(call.row, call.row + call.end - call.start)
        latents, rotated = (each.to(query.device) for each in call.kv.span(layer, first, call.end))
        keys, values = expand(latents[None], rotated[None])
        out[rows] = attend(query[0, :, rows], keys[0], values[0], offset=call.start - first, **options)
    return out


def _in_pages(
    cache: RaggedCache,
    arena: KVArena,
    layer: int,
    query: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention [tokens, heads, dim] of a step whose sequences have pages of one arena: with one call of a kernel for
    all that is gathered at once, if there is a kernel, else call by call."""
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    packed = query[0].transpose(0, 1)
    waiting = iter(cache.calls)
    host = None if query.device.type == HOST else arena.on_host(layer)
    step = cache.step(query.device, options["window"])
    row = 0
    for number, calls in enumerate(step.calls):
        rows = slice(row, row + sum(calls.rows))
        own = [next(waiting) for _ in calls.rows]
        if host is None:
            keys, values = (each.index_select(0, calls.gathered) for each in arena.layer(layer))
        else:
            keys, values = host.read(cache, layer, options["window"], number, query.device)
        _attend_in_pages(own, calls, keys, values, packed[rows], out[rows], options)
        row = rows.stop
    return out


def _attend_in_pages(
    own: Seq[AttentionCall],
    calls: PagedCalls,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    options: dict[str, Any],
) -> None:
    """Write the attention of ``packed`` [tokens, heads, dim], the rows of ``own`` calls, to ``out``.

    Args:
        own: The calls.
        calls: Their lengths.
        keys: What they attend to [positions, key-value heads, dim], of one after the other.
        values: Likewise.
        packed: Queries.
        out: As large as these.
        options: Of `attend`.
    """
    kernel = _kernel(packed.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), options)
    if kernel is not None:
        longest, scale, window = max(calls.lengths), options["scale"], options["window"]
        out.copy_(kernel(packed, keys, values, calls.queries, calls.keys, longest, scale, window))
        return
    begin = row = 0
    for call, length, count in zip(own, calls.lengths, calls.rows, strict=True):
        rows, seen = slice(row, row + count), slice(begin, begin + length)
        begin, row = begin + length, row + count
        out[rows] = attend(
            packed[rows].transpose(0, 1),
            keys[seen].transpose(0, 1),
            values[seen].transpose(0, 1),
            offset=call.start - call.first(options["window"]),
            **options,
        )


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> Kernel | None:
    """The kernel for all calls of a layer, whose tensors are [heads, rows, dim]; None where each is computed alone."""
    if options["softcap"] is not None or options["sinks"] is not None:
        return None
    return batched_kernel(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), attend)


def _ragged_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a packed step; outside one, the mask of scaled-dot-product attention."""
    if active_cache() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def register() -> None:
    """Register the attention with transformers under :data:`NAME`. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, ragged_attention)
    AttentionMaskInterface.register(NAME, _ragged_mask)
