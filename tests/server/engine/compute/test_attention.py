"""Ragged attention against the formula written out, and what a packed step attends to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.server.engine.compute.attention import RaggedCache, Span, attend, split_positions
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV

positions = st.integers(0, 4 * PROMPT_BLOCK)


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


def test_on_an_accelerator_heads_that_share_keys_take_the_memory_of_one(accelerators: None) -> None:
    torch.manual_seed(0)
    device = "virtual:0"
    query, key, value = (torch.randn(heads, 128, 8, device=device) for heads in (8, 1, 1))
    peaks = []
    for shared in (query[:1], query):
        reset_peak_memory(0)
        before = memory_allocated(0)
        got = attend(shared, key, value, offset=0, window=70)
        peaks.append(max_memory_allocated(0) - before)
        expected = formula(shared.cpu(), key.cpu(), value.cpu(), offset=0, scale=8**-0.5, window=70)
        torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    one, eight = peaks
    assert eight <= one + query.nbytes + 64


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


def texts(*lengths: int) -> list[PagedKV]:
    arena = KVArena(8 * PROMPT_BLOCK)
    made = [PagedKV(arena) for _ in lengths]
    for kv, length in zip(made, lengths, strict=True):
        kv.reserve(length)
    return made


@pytest.mark.parametrize("window", [None, 4])
def test_the_next_step_is_expected_to_read_what_it_reads_if_each_text_gets_one_token(window: int | None) -> None:
    one, other = texts(9, 9)
    now = RaggedCache([Span(one, 0, 0, 5, 5), Span(other, 5, 7, 8, 3)])  # a prompt ends, a text goes on
    then = RaggedCache([Span(one, 0, 5, 6, 5), Span(other, 1, 8, 9, 3)])
    expected = now.ahead(window)
    assert expected is not None
    assert then.readings(torch.device("cpu"), window)[0].fetches(expected)
    assert now.ahead(window) is expected


def test_a_token_is_expected_before_it_has_a_page() -> None:
    (kv,) = texts(PROMPT_BLOCK)
    now = RaggedCache([Span(kv, 0, PROMPT_BLOCK - 1, PROMPT_BLOCK, 3)])
    expected = now.ahead(None)
    kv.reserve(PROMPT_BLOCK + 1)
    then = RaggedCache([Span(kv, 0, PROMPT_BLOCK, PROMPT_BLOCK + 1, 3)])
    assert expected is not None
    assert then.readings(torch.device("cpu"), None)[0].fetches(expected)


def test_nothing_is_expected_beside_prompts_and_drafts_or_of_more_than_all_pages() -> None:
    one, other = texts(9, 8 * PROMPT_BLOCK - PROMPT_BLOCK)
    assert RaggedCache([Span(one, 0, 0, 5, 6)]).ahead(None) is None
    assert RaggedCache([Span(one, 0, 5, 8, 5)]).ahead(None) is None
    whole = [Span(one, 0, 5, 6, 5), Span(other, 1, 7 * PROMPT_BLOCK - 1, 7 * PROMPT_BLOCK, 5)]
    assert RaggedCache(whole).ahead(None) is not None
    assert RaggedCache([*whole, *whole[1:]][1:]).ahead(None) is not None  # what is read at once is a part of it
