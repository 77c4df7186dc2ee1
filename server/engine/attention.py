"""Attention over a ragged batch: every sequence attends to its own keys and values only.

A step of the engine packs the new tokens of all its sequences into one row ``[1, tokens]``. Everything in a
transformer except attention works token by token, so one forward serves them all; attention is done here,
sequence by sequence, without padding.

The shapes of every attention call are a function of the sequence alone: prompt tokens are attended in blocks
of :data:`PROMPT_BLOCK` positions counted from the start of the prompt, generated tokens one at a time. What
else is in the batch, how a prompt was cut into chunks, and whether a sequence had to be recomputed cannot
change a bit of the result.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from bigmodel.server.engine.cache import RaggedCache, SequenceKV

PROMPT_BLOCK = 128
NAME = "bigmodel_ragged"

_active = threading.local()


@dataclass(frozen=True)
class Piece:
    """One attention call: rows ``row`` .. of the packed step are positions ``start`` to ``end`` of ``kv``."""

    kv: SequenceKV
    row: int
    start: int
    end: int


def split_positions(start: int, end: int, prompt_length: int) -> Iterator[tuple[int, int]]:
    """Cut positions ``start`` to ``end`` into attention calls: prompt blocks, then single positions."""
    while start < min(end, prompt_length):
        stop = min((start // PROMPT_BLOCK + 1) * PROMPT_BLOCK, prompt_length, end)
        yield start, stop
        start = stop
    for position in range(start, end):
        yield position, position + 1


@contextmanager
def ragged_step(cache: RaggedCache) -> Iterator[None]:
    """Within it, forwards of this thread attend through ``cache``; outside, plain attention is used."""
    _active.cache = cache
    try:
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
    """Causal attention of one sequence's block of new positions.

    ``query`` [heads, tokens, dim], ``key`` and ``value`` [key-value heads, positions, dim]; query token t is
    at position ``offset + t`` of the keys given. Query heads that share a key-value head are laid side by
    side as rows, so keys and values are never repeated in memory. ``window`` limits how far back a position
    sees. Returns [tokens, heads, value dim].
    """
    heads, tokens, dim = query.shape
    groups = heads // key.shape[0]
    packed = query.reshape(key.shape[0], groups * tokens, dim)
    mask = None
    if tokens > 1 or softcap is not None or sinks is not None:
        mask = _causal_mask(tokens, key.shape[1], offset, window, query.device)
        mask = mask.repeat(groups, 1)
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            packed[None], key[None], value[None], attn_mask=mask, scale=scale
        )[0]
    else:
        assert mask is not None
        out = _plain_attention(packed, key, value, mask, scale, softcap, sinks, groups)
    return out.reshape(heads, tokens, value.shape[-1]).transpose(0, 1)


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
    """The formula written out, for soft-capped scores and attention sinks, which the fused kernel lacks."""
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

    ``query`` [1, heads, tokens, dim] is the packed step. Outside an engine step it is transformers' own
    scaled-dot-product attention, so the model keeps working as before.
    """
    cache: RaggedCache | None = getattr(_active, "cache", None)
    if cache is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache.attended.add(layer)
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    # No weight is multiplied by in here: a function mode that waits for that need not see these many small calls.
    with torch._C.DisableTorchFunction():
        for piece in cache.pieces:
            keys, values = piece.kv.layer(layer)
            first = 0 if sliding_window is None else max(0, piece.start - sliding_window + 1)
            tokens = piece.end - piece.start
            out[piece.row : piece.row + tokens] = attend(
                query[0, :, piece.row : piece.row + tokens],
                keys[:, first : piece.end],
                values[:, first : piece.end],
                offset=piece.start - first,
                scale=scaling,
                window=sliding_window,
                softcap=softcap,
                sinks=s_aux,
            )
    return out[None], None


def _ragged_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask is built for a packed step; outside one, the mask of scaled-dot-product attention."""
    if getattr(_active, "cache", None) is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def register() -> None:
    """Make ``model.set_attn_implementation(NAME)`` known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, ragged_attention)
    AttentionMaskInterface.register(NAME, _ragged_mask)
