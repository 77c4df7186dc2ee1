"""`ParallelismConfig`: the sizes of the device mesh that data, sharded and tensor parallelism share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment

_PREFIX = "PARALLELISM_CONFIG_"


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism over `tp_size` ranks, following the model's `tp_plan`.

    Attributes:
        tp_size: ranks that split each layer.
        torch_device_mesh: a mesh of the caller's with a "tp" dimension; default: all ranks.
        tp_plan: what is split how, by module name ("layers.*.mlp.up_proj": "colwise"); default: the model's own.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
    tp_plan: dict[str, str] | None = None


@dataclass
class TorchTensorParallelConfig:
    """Arguments of tensor parallelism within a `ParallelismConfig`.

    Attributes:
        enable_async_tp: accepted, as in accelerate, and unused.
        tp_plan: as in `TorchTensorParallelPlugin`.
    """

    enable_async_tp: bool = False
    tp_plan: dict[str, str] | None = None


@dataclass
class ParallelismConfig:
    """Numbers of ranks that replicate the model, shard it, and split its layers; their product is the process count.

    A size left at None is read from PARALLELISM_CONFIG_DP_REPLICATE_SIZE, ..._DP_SHARD_SIZE and ..._TP_SIZE, as
    `bigmodel launch` sets them, and is 1 otherwise.

    Attributes:
        dp_replicate_size: copies of the (sharded) model.
        dp_shard_size: ranks over which FSDP2 shards each copy.
        tp_size: ranks that split each layer.
        cp_size, sp_size: only 1: context and sequence parallelism are not supported.

    Raises:
        TrainError: a size below 1, or a combination that is not supported.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: Any = None
    sp_handler: Any = None
    device_mesh: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is None:
                setattr(self, name, environment.integer(_PREFIX + name.upper(), 1))
            if getattr(self, name) < 1:
                raise TrainError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, what in (("cp_size", "context"), ("sp_size", "sequence")):
            if getattr(self, name) > 1:
                raise TrainError(
                    f"{name} is {getattr(self, name)}, but {what} parallelism is not supported; "
                    "use tp_size to split layers and dp_shard_size to shard parameters"
                )
        if self.tp_enabled and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise TrainError(
                "tp_size and dp_replicate_size above 1 need dp_shard_size above 1 too: "
                "replicate through FSDP2's shards, or set dp_replicate_size to 1"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Size by mesh dimension, the outermost first."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """The product of all sizes: the number of processes it is meant for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that read the same data."""
        return self.sizes["tp"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one copy of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Always False."""
        return False

    @property
    def sp_enabled(self) -> bool:
        """Always False."""
        return False

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the mesh dimensions above 1, the outermost first."""
        return [name for name, size in self.sizes.items() if size > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the active dimensions along which data differs."""
        return [name for name in self.active_mesh_dims if name != "tp"]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the active dimensions along which data is the same."""
        return [name for name in self.active_mesh_dims if name == "tp"]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the dimensions FSDP2 works along; the last one shards."""
        replicate = ["dp_replicate"] if self.dp_replicate_enabled else []
        return [*replicate, "dp_shard"]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Names of the active dimensions along which parameters are sharded."""
        return [name for name in self.active_mesh_dims if name == "dp_shard"]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Names of the active dimensions along which losses are averaged."""
        return self.dp_dim_names

    def to_json(self) -> dict[str, Any]:
        """Return the sizes and settings, without the mesh, as what JSON can hold."""
        settings = {name: value for name, value in vars(self).items() if name != "device_mesh"}
        return {name: dict(vars(each)) if hasattr(each, "__dict__") else each for name, each in settings.items()}

    def build_device_mesh(self, device_type: str) -> Any:
        """Create and store the `DeviceMesh` over all processes. Needs the process group.

        Returns:
            The mesh with one named dimension for each of "dp_replicate" (when above 1), "dp_shard", "tp" (when above
            1), or None when every size is 1.

        Raises:
            TrainError: the sizes do not multiply to the number of processes.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if self.total_size == 1:
            return None
        world = dist.get_world_size()
        if self.total_size != world:
            raise TrainError(
                f"dp_replicate_size {self.dp_replicate_size} x dp_shard_size {self.dp_shard_size} x tp_size "
                f"{self.tp_size} = {self.total_size}, but there are {world} processes; make them equal"
            )
        names = [n for n in self.sizes if n == "dp_shard" or self.sizes[n] > 1]
        shape = tuple(self.sizes[name] for name in names)
        self.device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh, built on first use for `device_type`."""
        if self.device_mesh is None and device_type is not None:
            self.build_device_mesh(device_type)
        return self.device_mesh
