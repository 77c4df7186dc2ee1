"""Tensor parallelism: every layer split over all ranks, which read the same data."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bigmodel.errors import TrainError
from bigmodel.train.strategies.placing import Placement, groups_of
from bigmodel.train.strategies.settings import StrategySettings
from bigmodel.train.strategies.sharded import ShardedStrategy
from bigmodel.train.strategies.tensor_plan import parallelize
from bigmodel.train.types import DistributedType


class TensorParallel(ShardedStrategy):
    """Splits layers by the model's `tp_plan`; with data parallelism beside it, use FSDP and a `ParallelismConfig`."""

    distributed_type: ClassVar[DistributedType] = DistributedType.TP

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.mesh = _mesh(settings)
        handler = getattr(settings.parallelism_config, "tp_handler", None)
        self._plan = getattr(settings.plugin, "tp_plan", None) or getattr(handler, "tp_plan", None)

    def data_parallel(self) -> tuple[int, int]:
        """Every rank reads the same data."""
        return 1, 0

    def shard(self, model: nn.Module) -> nn.Module:
        """Give every rank rank 0's weights, then split the layers of the plan."""
        Placement(model, self.settings.device, groups_of(self.mesh)).place(model)
        return parallelize(model, self.mesh, self._plan)


def _mesh(settings: StrategySettings) -> Any:
    if not dist.is_initialized():
        raise TrainError("tensor parallelism needs a process group; start the script with `bigmodel launch`")
    mesh = settings.device_mesh or getattr(settings.plugin, "torch_device_mesh", None)
    asked = getattr(settings.plugin, "tp_size", None) or getattr(settings.parallelism_config, "tp_size", 1)
    if mesh is None:
        mesh = init_device_mesh(settings.device.type, (settings.num_processes,), mesh_dim_names=("tp",))
    elif mesh.ndim > 1:
        mesh = mesh["tp"]
    if mesh.size() != settings.num_processes or asked not in (1, settings.num_processes):
        raise TrainError(
            f"tp_size is {asked} with {settings.num_processes} processes: tensor parallelism alone uses all of them. "
            "To shard data parallel copies beside it, use FSDP (FullyShardedDataParallelPlugin) with "
            "ParallelismConfig(dp_shard_size=..., tp_size=...)"
        )
    return mesh
