"""A model of equal blocks of chosen bytes and compute, for measuring overlap and overhead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


class SquareLayer(nn.Module):
    """One square linear layer, a unit of placement."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, scaled so that values keep their magnitude."""
        return torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """`count` blocks in a row, `width` wide; float32."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquareLayer(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks one after the other on `x`, rows by `width`."""
        for block in self.blocks:
            x = block(x)
        return x


def make_blocks(count: int, width: int, seed: int = 0) -> Blocks:
    """Return blocks with random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Blocks(count, width).eval()


def block_map(count: int, streamed: Sequence[int], home: int | str, resident: int | str) -> dict[str, int | str]:
    """Return the map that stores the blocks at the positions `streamed` on `home` and the others on `resident`."""
    return {f"blocks.{index}": home if index in set(streamed) else resident for index in range(count)}


def spread(count: int, streamed: int) -> list[int]:
    """Return `streamed` of `count` positions, spread evenly, including the last."""
    return [(index + 1) * count // streamed - 1 for index in range(streamed)]


def save_blocks(model: Blocks, folder: Path) -> Path:
    """Write the blocks' weights as one safetensors file and return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path
