"""Sizes of the device mesh."""

from __future__ import annotations

import json

import pytest

from bigmodel.errors import TrainError
from bigmodel.train.strategies.sharded.parallelism import ParallelismConfig, TorchTensorParallelConfig


def test_sizes_multiply_and_name_the_dimensions_above_one() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=3)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (24, 8, 3)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert (config.dp_dim_names, config.non_dp_dim_names) == (["dp_replicate", "dp_shard"], ["tp"])
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard"]


def test_what_is_not_said_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert ParallelismConfig().sizes == {"dp_replicate": 1, "dp_shard": 1, "tp": 4}
    assert ParallelismConfig(tp_size=2).tp_size == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0; it must be at least 1"),
        ({"cp_size": 2}, "context parallelism is not supported; use tp_size"),
        ({"sp_size": 2}, "sequence parallelism is not supported"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "need dp_shard_size above 1 too"),
    ],
)
def test_what_is_not_supported_names_the_alternative(sizes: dict, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        ParallelismConfig(**sizes)


def test_a_mesh_of_one_is_no_mesh() -> None:
    assert ParallelismConfig().build_device_mesh("cpu") is None


def test_it_is_what_json_can_hold() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_handler=TorchTensorParallelConfig())
    config.device_mesh = object()
    found = json.loads(json.dumps(config.to_json()))
    assert (found["dp_replicate_size"], found["tp_size"], "device_mesh" in found) == (2, 1, False)
    assert found["tp_handler"] == vars(config.tp_handler)
    assert (config.dp_shard_cp_dim_names, config.dp_cp_dim_names) == (["dp_shard"], ["dp_replicate", "dp_shard"])
