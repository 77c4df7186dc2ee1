"""Outputs of two kinds of devices are compared as far as rounding lets them be the same text."""

from __future__ import annotations

import torch

from .tiny import Outputs


def text(*best: int, shift: float = 0.0) -> Outputs:
    """Return text whose steps choose the tokens `best`, 0 or 1, by scores that are nearly equal."""
    scores = [torch.tensor([[1.0 + (token == at) * 1e-3 for at in range(2)]]) + shift for token in best]
    return Outputs([torch.tensor([best])], scores)


def test_other_bits_differ_without_a_tolerance() -> None:
    assert text(0, 1).difference(text(0, 1)) == ""
    assert "differs" in text(0, 1).difference(text(0, 1, shift=1e-6))


def test_text_is_compared_up_to_the_step_in_which_rounding_has_another_token_chosen() -> None:
    parted = Outputs([torch.tensor([[0, 1, 0]])], [*text(0, 1).scores, torch.tensor([[9.0, 3.0]])])
    assert parted.difference(text(0, 0, 0), tolerance=0.01) == ""
    assert "differs by" in parted.difference(text(0, 1, 0), tolerance=0.01)
    assert "differs by" in text(0, 1).difference(text(0, 0), tolerance=1e-6)


def test_numbers_of_no_text_are_compared_as_they_are() -> None:
    assert Outputs([torch.tensor([1.0])]).difference(Outputs([torch.tensor([1.001])]), tolerance=0.01) == ""
    assert "int64" in Outputs([torch.tensor([1])]).difference(Outputs([torch.tensor([2])]), tolerance=0.01)
