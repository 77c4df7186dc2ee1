"""Small models for the tests of profile and plan. Built on meta, so their size costs nothing."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block: it must not be cut in two."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden or 4 * width)
        self.down = nn.Linear(hidden or 4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Embedding, blocks, norm and head; by choice tied, with a direct parameter and a direct buffer."""

    def __init__(
        self, width: int = 16, depth: int = 4, vocabulary: int = 32, tied: bool = False, direct: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if direct:
            self.scale = nn.Parameter(torch.ones(width))
            self.register_buffer("offset", torch.zeros(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if hasattr(self, "scale"):
            x = x * self.scale + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Flat(nn.Module):
    """A model without blocks, of 236 bytes: linear1 64, batchnorm 72, linear2 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


def on_meta(make: object, *args: object, **kwargs: object) -> nn.Module:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return make(*args, **kwargs)  # type: ignore[operator]


def tiny_llama(**changes: object) -> nn.Module:
    """A Llama of four layers on meta; `changes` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 512,
    }
    return on_meta(LlamaForCausalLM, LlamaConfig(**{**settings, **changes}))
