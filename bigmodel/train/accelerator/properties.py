"""What the Accelerator says of itself."""

from __future__ import annotations

from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.types import DistributedType


class Properties(AcceleratorCore):
    """Echoes of the configuration, and coordinates in the device mesh."""

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes train together."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether more than one accelerator is in use."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, or None."""
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split among processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round of batches is filled up."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether epochs are shuffled by seed + epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders go on by themselves after `load_state`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass closes an accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value
        self.strategy.set_sync_gradients(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backward passes to one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps < 1:
            raise TrainError(f"gradient accumulation over {steps} steps; give 1 or more")
        self.gradient_state.plugin.num_steps = steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because gradients overflowed in fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def fp8_backend(self) -> str | None:
        """What computes in fp8: "AO" (torchao), or None without fp8."""
        return "AO" if self.mixed_precision == "fp8" else None

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds a full copy of what is to be saved."""
        return self.strategy.should_save_model

    @property
    def parallelism_config(self) -> Any:
        """The `ParallelismConfig`, or None."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, or None."""
        return self.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether ranks form a mesh."""
        return self.torch_device_mesh is not None

    def _mesh_rank(self, *names: str) -> int:
        mesh = self.torch_device_mesh
        present = [name for name in names if name in (getattr(mesh, "mesh_dim_names", None) or ())]
        return int(mesh.get_local_rank(present[0])) if present else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's number among those that share each layer."""
        return self._mesh_rank("tp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's number among those that read different data."""
        return self.strategy.data_parallel()[1]

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's number among those that share one copy of the parameters."""
        return self._mesh_rank("dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Not supported."""
        raise TrainError("pipeline parallelism is not supported; use tensor parallelism or FSDP2")

    @property
    def context_parallel_rank(self) -> int:
        """Not supported."""
        raise TrainError("context parallelism is not supported; use tensor parallelism or FSDP2")
