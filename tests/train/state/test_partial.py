"""PartialState: who this process is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bigmodel.errors import TrainError
from bigmodel.train import DistributedType, PartialState
from tests.train.multiprocess import on_ranks


def test_without_a_launcher_there_is_one_process() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.distributed_type == DistributedType.NO
    assert state.device == state.default_device == torch.device("cpu")
    assert state.backend is None
    assert not state.use_distributed
    state.wait_for_everyone()
    assert "Num processes: 1" in repr(state)


def test_every_instance_shares_one_state() -> None:
    first = PartialState()
    second = PartialState()
    first.device = torch.device("meta")
    assert second.device == torch.device("meta")


@pytest.mark.usefixtures("accelerators")
def test_the_first_accelerator_is_used_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert PartialState().device == torch.device("virtual:0")
    PartialState._reset_state()
    assert PartialState(cpu=True).device == torch.device("cpu")


@pytest.mark.usefixtures("accelerators")
def test_a_process_without_an_accelerator_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match=r"process 2 .* there are 2 .*cpu=True"):
        PartialState()


def test_several_processes_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(TrainError, match="MASTER_ADDR must be set"):
        PartialState()


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(TrainError, match="WORLD_SIZE='two'"):
        PartialState()


def test_a_process_knows_that_a_function_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORK_LAUNCHED", raising=False)
    assert not PartialState().fork_launched
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    assert PartialState().fork_launched


def test_a_group_of_one_is_made_where_a_strategy_needs_it() -> None:
    state = PartialState()
    state.need_process_group()
    try:
        assert dist.get_world_size() == 1
        assert state.backend == "gloo"
    finally:
        state.destroy_process_group()
    assert not dist.is_initialized()


def test_the_device_of_a_single_process_can_be_changed() -> None:
    state = PartialState()
    state.set_device("meta")
    assert state.device.type == "meta"
    state.set_device("cuda")
    assert state.device == torch.device("cuda", 0), "an index is needed to wait for the other processes"


@on_ranks
def test_two_processes_know_their_numbers() -> None:
    state = PartialState()
    assert state.num_processes == 2
    assert state.process_index == dist.get_rank() == state.local_process_index
    assert state.distributed_type == DistributedType.MULTI_CPU
    assert state.backend == "gloo"
    with pytest.raises(TrainError, match="cannot be changed"):
        state.set_device("cpu")


@on_ranks
def test_a_timeout_given_later_still_counts() -> None:
    def seconds() -> float:
        options: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())

    before = seconds()
    PartialState(timeout=timedelta(seconds=before + 15))
    assert seconds() == before + 15
    PartialState(timeout=timedelta(seconds=before))  # the processes run other tests
    assert seconds() == before
