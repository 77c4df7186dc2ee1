"""Weights in a narrow dtype between forwards."""

import torch
from torch import nn

from bigmodel.hooks import attach_layerwise_casting_hooks


def test_linear_layers_are_stored_narrow_and_compute_wide() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    assert model(torch.ones(1, 3)).dtype == torch.float32
    assert [part.weight.dtype for part in model] == [torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn]


def test_names_and_classes_may_be_left_out() -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 3), "body": nn.Linear(3, 3), "mix": nn.Conv1d(1, 1, 1)})
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, "head", [nn.Conv1d])
    dtypes = [part.weight.dtype for part in model.values()]
    assert dtypes == [torch.float32, torch.float16, torch.float32]
