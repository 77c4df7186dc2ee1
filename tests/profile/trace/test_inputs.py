"""The inputs of models by their libraries' conventions, and inputs described in text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.profile import profile_model
from bigmodel.profile.trace.inputs import parse_inputs, plain_token

from ..models import Flat


def test_text_describes_inputs_as_tensors_on_meta() -> None:
    found = parse_inputs(["pixel_values=1x3x8x8", "input_ids=2x5", "noise=4:bfloat16"])
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == {
        "pixel_values": ((1, 3, 8, 8), torch.float32),
        "input_ids": ((2, 5), torch.int64),
        "noise": ((4,), torch.bfloat16),
    }
    assert all(tensor.device.type == "meta" for tensor in found.values())


@pytest.mark.parametrize("text", ["pixel_values", "pixel_values=1xtwo", "x=2:float31", "x=", "=3"])
def test_text_that_describes_no_input_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="pixel_values=1x3x224x224"):
        parse_inputs([text])


def test_a_plain_token_is_none_of_those_that_the_config_names() -> None:
    config = SimpleNamespace(pad_token_id=3, eos_token_id=[4, 5], image_token_index=6)
    assert plain_token(config) == 7


class TimmLike(nn.Module):
    """A module that says as timm's do which size it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 16, 16)}
        self.stem = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stem(x)


class DiffusersLike(nn.Module):
    """A module whose config describes noisy samples, as those of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"sample_size": 8, "in_channels": 4, "cross_attention_dim": 6}
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.outer = nn.Linear(6, 4)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        assert sample.shape[2:] == (8, 8)
        return self.inner(sample) + self.outer(encoder_hidden_states).mean(1)[..., None, None] * timestep.view(
            -1, 1, 1, 1
        )


@pytest.mark.parametrize("make", [TimmLike, DiffusersLike])
def test_models_of_other_libraries_are_known_by_their_attributes(make: type[nn.Module]) -> None:
    profile = profile_model(make(), batch_size=2)
    assert [phase.name for phase in profile.phases] == ["forward"]
    assert profile.activations > 0
    assert profile.unknown == ""


def test_inputs_that_follow_no_convention_are_noted_as_unknown() -> None:
    assert "not known" in profile_model(Flat()).unknown
    known = profile_model(Flat(), sample_inputs=(torch.empty(20, 3, device="meta"),))
    assert known.unknown == ""
    assert known.activations >= 20 * (4 + 5) * 4
