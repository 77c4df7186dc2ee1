"""`prepare_pippy`: one model over several processes computes what it computes in one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel import prepare_pippy
from bigmodel.compat.inference import balanced_split_points
from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from tests.train.multiprocess import on_ranks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "sums": x.sum(-1), "none": None}


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows * 5).view(rows, 5) % 16


def test_stages_hold_nearly_the_same_bytes() -> None:
    assert balanced_split_points(Network(8, 8, 8, 8), 2) == ["layers.2"]
    assert balanced_split_points(Network(8, 8, 8, 80), 2) == ["layers.3"]
    assert balanced_split_points(Network(80, 8, 8, 8), 3) == ["layers.0", "layers.1"]
    assert balanced_split_points(Network(8, 8), 1) == []
    assert balanced_split_points(Network(8), 2, ["Layer"]) == ["layers.0"]
    with pytest.raises(TrainError, match="Network has 2 parts that hold weights: 3 stages need as many"):
        balanced_split_points(Network(8), 3)


def test_in_one_process_the_model_stays_as_it_is() -> None:
    model = Network(8, 8)
    forward = model.forward
    assert prepare_pippy(model, example_args=(tokens(1),)) is model
    assert model.forward == forward
    assert model.hf_split_points == []


@pytest.mark.slow  # traces a model
@on_ranks
def test_the_last_process_has_the_output_of_batches_of_any_size() -> None:
    expected = Network(8, 8, 8)
    model = prepare_pippy(Network(8, 8, 8), example_args=(tokens(2),))
    assert model.hf_split_points == ["layers.1"]
    last = PartialState().is_last_process
    with torch.no_grad():
        for rows in (2, 4, 5, 1):
            found = model(tokens(rows))
            assert (found is not None) == last
            assert found is None or torch.equal(found["sums"], expected(tokens(rows))["sums"])
    with pytest.raises(TrainError, match="traced with rows of inputs of shapes"):
        model(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.slow  # traces a model
@on_ranks
def test_every_process_has_it_if_asked() -> None:
    model = prepare_pippy(Network(8, 8), ["layers.0"], example_kwargs={"ids": tokens(1)}, gather_output=True)
    with torch.no_grad():
        found = model(ids=tokens(3))
    assert torch.equal(found["sums"], Network(8, 8)(tokens(3))["sums"])
    assert found["none"] is None


@on_ranks
def test_as_many_split_points_as_processes_need() -> None:
    with pytest.raises(TrainError, match="split_points has 2 names, but 2 processes run 2 stages: give 1"):
        prepare_pippy(Network(8, 8, 8), ["layers.1", "layers.2"], example_args=(tokens(1),))


class WithEarly(Network):
    """Returns what an early layer computes, too."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        early = self.embed(ids)
        return {"hidden": self.layers[1](self.layers[0](early)), "early": early}


@on_ranks
def test_what_earlier_stages_compute_cannot_be_returned() -> None:
    with pytest.raises(TrainError, match="WithEarly returns 2 tensors, of which the last stage computes 1"):
        prepare_pippy(WithEarly(8, 8), example_args=(tokens(1),))
