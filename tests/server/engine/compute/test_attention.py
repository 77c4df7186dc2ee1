"""Ragged attention against the formula written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.engine.compute.attention import RaggedCache, Span, attend, split_positions
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Position by position and head by head, in double precision."""
    heads, tokens, _ = query.shape
    groups = heads // key.shape[0]
    out = torch.zeros(tokens, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        for token in range(tokens):
            position = offset + token
            first = 0 if window is None else max(0, position - window + 1)
            keys = key[head // groups, first : position + 1].double()
            scores = keys @ query[head, token].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[token, head] = (weights / total) @ value[head // groups, first : position + 1].double()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"window": 3}, {"softcap": 2.0}, {"softcap": 2.0, "window": 4}])
@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (1, 9), (5, 0), (5, 7)])
@pytest.mark.parametrize("groups", [1, 3])
def test_attend_is_the_formula(extra: dict[str, float], tokens: int, offset: int, groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2 * groups, tokens, 8)
    key, value = torch.randn(2, offset + tokens, 8), torch.randn(2, offset + tokens, 6)
    if tokens == 1 and "window" in extra:
        # The caller cuts the keys to the window; for one token there is nothing left to mask.
        first = max(0, offset - int(extra["window"]) + 1)
        key, value, offset = key[:, first:], value[:, first:], offset - first
    got = attend(query, key, value, offset=offset, scale=0.3, **extra)  # type: ignore[arg-type]
    expected = formula(query, key, value, offset=offset, scale=0.3, **extra)  # type: ignore[arg-type]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_sinks_take_part_in_the_sum() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    sinks = torch.randn(4)
    got = attend(query, key, value, offset=2, scale=0.5, sinks=sinks)
    expected = formula(query, key, value, offset=2, scale=0.5, sinks=sinks)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


positions = st.integers(0, 4 * PROMPT_BLOCK)


@given(positions, positions, positions)
def test_split_positions_does_not_depend_on_the_partition_of_a_text(prompt: int, cut: int, end: int) -> None:
    """Cutting at a block border or in the generated part gives the pieces of the uncut text."""
    cut = min(cut, end)
    if cut < prompt:
        cut = cut // PROMPT_BLOCK * PROMPT_BLOCK
    whole = list(split_positions(0, end, prompt))
    assert list(split_positions(0, cut, prompt)) + list(split_positions(cut, end, prompt)) == whole
    assert [p for start, stop in whole for p in range(start, stop)] == list(range(end))
    assert all(stop - start == 1 for start, stop in whole if start >= prompt)


def test_keys_and_values_of_a_packed_step_go_to_their_sequences() -> None:
    a, b = SequenceKV(), SequenceKV()
    a.reserve(8)
    b.reserve(8)
    a.write(0, 0, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    cache = RaggedCache([Span(a, 0, 3, 4, 2), Span(b, 1, 0, 3, 3)])
    packed = torch.randn(1, 2, 5, 4)  # one row of padding at the end
    cache.update(packed, packed * 2, 0)
    assert torch.equal(a.layer(0)[0][:, 3:4], packed[0, :, 0:1])
    assert torch.equal(b.layer(0)[1][:, :3], packed[0, :, 1:4] * 2)
    assert [(call.row, call.start, call.end) for call in cache.calls] == [(0, 3, 4), (1, 0, 3)]
