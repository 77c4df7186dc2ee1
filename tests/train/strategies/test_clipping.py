"""Norms of gradients; over several ranks they are tested with the curves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.train.strategies.clipping import clip_grad_norm

CPU = torch.device("cpu")


def parameters(seed: int, scale: float) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (0,), (2,)]]
    for parameter in made[:3]:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return made


@given(
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    largest=st.sampled_from([0.1, 1.0, 10.0]),
    kind=st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
)
def test_it_is_torchs_clipping_where_nothing_is_sharded(seed: int, scale: float, largest: float, kind: float) -> None:
    ours, theirs = parameters(seed, scale), parameters(seed, scale)
    found = clip_grad_norm(ours, largest, kind, CPU)
    full = [p for p in theirs if p.grad is not None and p.grad.numel()]
    expected = torch.nn.utils.clip_grad_norm_(full, largest, norm_type=kind)
    torch.testing.assert_close(found, expected)
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_no_gradients_have_no_norm() -> None:
    assert clip_grad_norm([torch.nn.Parameter(torch.ones(2))], 1.0, 2.0, CPU) == pytest.approx(0.0)
