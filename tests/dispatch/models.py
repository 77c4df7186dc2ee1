"""Small models for the tests of dispatch."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel.dispatch import dispatch_model, get_plan
from bigmodel.plan import Plan

from ..accelerators import at


class Block(nn.Module):
    """A residual block: cut in two it could not run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """An embedding, residual blocks with statistics between, and a head tied to the embedding.

    `scale` is a parameter of the model itself; `used` counts forwards in a buffer.
    """

    def __init__(self, width: int = 8, depth: int = 4, words: int = 11) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("used", torch.zeros((), dtype=torch.long))
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, fail_at: int | None = None) -> torch.Tensor:
        self.used += 1
        x = self.embed(ids) * self.scale
        for index, block in enumerate(self.blocks):
            if index == fail_at:
                raise ValueError("asked to fail")
            x = block(x)
        return self.head(self.norm(x))


def stack(seed: int = 0, **sizes: int) -> Stack:
    """Return a `Stack` with the weights of `seed`, in eval mode."""
    torch.manual_seed(seed)
    return Stack(**sizes).eval()


def llama(layers: int = 4, **sizes: int) -> LlamaForCausalLM:
    """Return a tiny Llama with random weights, in eval mode."""
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(LlamaConfig(**{**small, **sizes})).eval()


def ids(rows: int = 3) -> torch.Tensor:
    """Return token ids for `Stack`."""
    return torch.arange(rows) * 3 % 11


def resident_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The slow, obvious twin: the whole model on one accelerator."""
    with torch.no_grad():
        return copy.deepcopy(model).to(at(0))(x.to(at(0))).cpu()


def in_turns(model: nn.Module, *blocks: str) -> Plan:
    """Return a plan by which `blocks` are streamed from RAM to accelerators 0 and 1 in turns, and the rest of
    `model` is on 0; the model is left as it was."""
    given: dict[str, int | str] = {"": 0, **dict.fromkeys(blocks, "cpu")}
    made = get_plan(dispatch_model(copy.deepcopy(model), given))
    assert made is not None
    turns = {part.name: turn % 2 for turn, part in enumerate(made.streamed)}
    return replace(made, parts=tuple(replace(part, runs_on=turns.get(part.name, part.runs_on)) for part in made.parts))
