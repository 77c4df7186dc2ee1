"""The model of equal blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.benchmarks.blocks import block_map, make_blocks, save_blocks, spread


@pytest.mark.parametrize(("count", "streamed"), [(24, 12), (24, 6), (10, 3), (5, 5), (7, 1)])
def test_streamed_blocks_are_spread_evenly(count: int, streamed: int) -> None:
    places = spread(count, streamed)
    gaps = [after - before for before, after in zip([-1, *places], places)]
    assert len(places) == streamed
    assert places[-1] == count - 1
    assert max(gaps) - min(gaps) <= 1


def test_a_map_names_every_block() -> None:
    assert block_map(3, [1], "disk", "cpu") == {"blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "cpu"}


def test_blocks_are_saved_as_they_are_and_values_stay_in_bounds(tmp_path: Path) -> None:
    model = make_blocks(4, 16)
    saved = load_file(save_blocks(model, tmp_path))
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(torch.ones(2, 16)), make_blocks(4, 16)(torch.ones(2, 16)))
    assert model(torch.full((1, 16), 1e6)).abs().max() <= 1
