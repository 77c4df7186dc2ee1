"""Bytes are counted where they lie, each once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bigmodel.server.models.weights import weight_bytes
from tests.server.tiny import tiny_model


def test_tied_weights_are_counted_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = layer.weight
    shared = nn.Linear(4, 4, bias=False)
    shared.weight = nn.Parameter(layer.weight.data)  # another tensor, the same memory
    assert weight_bytes(nn.Sequential(layer, tied, shared)) == {"cpu": 64}


def test_buffers_count_and_empty_tensors_do_not() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(3, dtype=torch.int16))
    module.register_buffer("nothing", torch.zeros(0))
    assert weight_bytes(module) == {"cpu": 6}


def test_views_of_a_checkpoint_are_on_disk(tmp_path: Path) -> None:
    from bigmodel.dispatch import from_pretrained

    model = tiny_model()
    model.save_pretrained(tmp_path)
    placed = from_pretrained(tmp_path, device_map={"": "disk"})
    found = weight_bytes(placed)
    assert found["disk"] == sum(p.nbytes for p in model.parameters())
