"""The parts of accelerate's pipeline inference: a schedule of `torch.distributed.pipelining`, and calls of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.compat.inference import balanced_split_points
from bigmodel.compat.pipelining import build_pipeline, find_pippy_batch_size, generate_device_map, pippy_forward
from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from tests.train.multiprocess import on_ranks
from tests.train.new_states import new_states as new_states


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x if scale is None else x * scale)


def test_every_part_has_the_number_of_its_process() -> None:
    placed = generate_device_map(Chain(4), 2, ["Block"])
    assert placed == {"enter": 0, **{f"blocks.{index}": int(index > 1) for index in range(4)}, "leave": 1}
    begins = [next(name for name, stage in placed.items() if stage == 1)]
    assert begins == balanced_split_points(Chain(4), 2, ["Block"])


def test_one_process_has_the_map_of_the_planner() -> None:
    placed = generate_device_map(Chain(1), 1, ["Block"], {"cpu": "1GB"})
    assert set(placed.values()) == {"cpu"}


def test_a_part_may_be_cut_where_a_stage_begins_in_it() -> None:
    placed = generate_device_map(Chain(1), 2, [])
    assert placed == {"enter": 0, "blocks.0.first": 0, "blocks.0.second": 1, "leave": 1}


def test_the_rows_of_a_batch_are_those_of_its_first_tensor() -> None:
    assert find_pippy_batch_size((torch.ones(3),), None) == 3
    assert find_pippy_batch_size(("text", {"x": torch.ones(5)}), {"y": torch.ones(2)}) == 5
    assert find_pippy_batch_size((), {"y": torch.ones(2)}) == 2
    assert find_pippy_batch_size(None, {}) is None


def test_one_process_calls_the_forward() -> None:
    assert pippy_forward(lambda x, plus: x + plus, 4, False, torch.ones(3), plus=1).tolist() == [2, 2, 2]


@pytest.mark.slow
@on_ranks
def test_stages_compute_what_the_whole_model_does() -> None:
    whole, x = Chain(2), torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([whole(half) for half in x.split(2)]).detach()
    schedule = build_pipeline(Chain(2), ["blocks.1"], (x[:2],), None, 2)
    last = PartialState().is_last_process
    with torch.no_grad():
        found = pippy_forward(schedule.step, 2, False, x)
        assert (found is not None) == last
        assert found is None or torch.equal(found, expected)
        gathered = pippy_forward(schedule.step, 2, True, x)
        assert torch.equal(gathered, expected)
        # A batch that is no multiple of the micro-batches is filled up with its last row.
        filled = pippy_forward(schedule.step, 2, True, x[:3])
        assert torch.equal(filled, torch.cat([expected[:3], expected[2:3]]))


@on_ranks
def test_a_call_without_tensors_has_no_rows() -> None:
    if PartialState().is_local_main_process:
        with pytest.raises(TrainError, match="no argument of the call is a tensor"):
            pippy_forward(print, 2, False, "text")
