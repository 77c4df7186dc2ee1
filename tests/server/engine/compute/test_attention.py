"""Ragged attention against the formula written out."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.server.engine.compute.attention import attend


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
