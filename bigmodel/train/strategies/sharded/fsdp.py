"""Fully sharded data parallelism with PyTorch's `fully_shard` (FSDP2), and the choice of its units."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from bigmodel.errors import TrainError
from bigmodel.train.strategies.base import StrategySettings
from bigmodel.train.strategies.sharded.blocks import class_names
from bigmodel.train.strategies.sharded.fsdp_plugin import FullyShardedDataParallelPlugin
from bigmodel.train.strategies.sharded.placing import WeightBroadcaster, groups_of
from bigmodel.train.strategies.sharded.strategy import ShardedStrategy
from bigmodel.train.strategies.sharded.tensor_parallel import parallelize
from bigmodel.train.types import DistributedType


def units_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the units of `model`, inner units first, without the model itself.

    Raises:
        TrainError: the policy names classes that the model does not have, or needs names and got none.
    """
    is_unit = _policy(model, plugin)
    found = [module for module in model.modules() if module is not model and is_unit(module)]
    return found[::-1]


def ignored_parameters(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[nn.Parameter]:
    """Return the parameters of `plugin.ignored_modules`."""
    ignored = plugin.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        modules = [module for name, module in model.named_modules() if name and pattern.fullmatch(name)]
    else:
        modules = list(ignored)
    return {parameter for module in modules for parameter in module.parameters()}


def _policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Callable[[nn.Module], bool]:
    policy = plugin.auto_wrap_policy
    if callable(policy):
        return _user_policy(policy)
    if policy == "NO_WRAP":
        return lambda module: False
    if policy == "SIZE_BASED_WRAP":
        return _by_size(model, plugin.min_num_params or 0)
    must = policy == "TRANSFORMER_BASED_WRAP"
    names = class_names(model, plugin.transformer_cls_names_to_wrap or (), must)
    return lambda module: type(module).__name__ in names


def _by_size(model: nn.Module, minimum: int) -> Callable[[nn.Module], bool]:
    """Select modules with at least `minimum` parameters that are in no inner unit."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if left < minimum or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return left
        chosen.add(id(module))
        return 0

    visit(model)
    return lambda module: id(module) in chosen


def _user_policy(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    """FSDP1's policies take (module, recurse, nonwrapped_numel); ours take the module."""
    names = set(inspect.signature(policy).parameters)
    if "recurse" in names:
        return lambda m: bool(policy(module=m, recurse=False, nonwrapped_numel=sum(p.numel() for p in m.parameters())))
    return lambda module: bool(policy(module))


class FullyShardedDataParallel(ShardedStrategy):
    """Each rank stores a slice of every parameter, of its gradient and of its optimizer state.

    A unit's parameters are gathered when its forward or backward begins and freed when it ends. With `tp_size` above 1
    in the parallelism config, layers are split first, and their parts are sharded.
    """

    distributed_type: ClassVar[DistributedType] = DistributedType.FSDP
    # fully_shard casts parameters and inputs by the mixed precision policy.
    autocast_forward: ClassVar[bool] = False

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.plugin: FullyShardedDataParallelPlugin = settings.plugin or FullyShardedDataParallelPlugin()
        self.plugin.set_mixed_precision(settings.mixed_precision)
        self._full_mesh = settings.device_mesh or _flat_mesh(settings, self.plugin)
        self.mesh = self._full_mesh[_fsdp_dimensions(self._full_mesh)]

    @property
    def writes_shards(self) -> bool:
        """Whether the plugin's `state_dict_type` is SHARDED_STATE_DICT."""
        return bool(self.plugin.state_dict_type == "SHARDED_STATE_DICT")

    def data_parallel(self) -> tuple[int, int]:
        """Ranks of one tensor-parallel group read the same data."""
        coordinate = [self.mesh.get_local_rank(dimension) for dimension in range(self.mesh.ndim)]
        index = 0
        for size, position in zip(self.mesh.shape, coordinate, strict=True):
            index = index * size + position
        return int(self.mesh.size()), index

    def shard(self, model: nn.Module) -> nn.Module:
        """Split layers (with tensor parallelism), then shard the units and finally the rest, one at a time."""
        broadcaster = self._broadcaster(model)
        if "tp" in (self._full_mesh.mesh_dim_names or ()):
            broadcaster.place(model)
            handler = getattr(self.settings.parallelism_config, "tp_handler", None)
            parallelize(model, self._full_mesh["tp"], getattr(handler, "tp_plan", None))
        ignored = ignored_parameters(model, self.plugin)
        units = units_of(model, self.plugin)
        for unit in units:
            if self.plugin.activation_checkpointing:
                _recompute_in_backward(unit, bool(self.plugin.activation_checkpointing_offload))
        arguments = self._arguments(ignored)
        # Outputs of the model are cast, not those of its parts: the next part computes with 16-bit weights.
        inside = {**arguments, "mp_policy": replace(arguments["mp_policy"], output_dtype=None)}
        for unit in [*units, model]:
            broadcaster.place(unit)
            fully_shard(unit, **(arguments if unit is model else inside))
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within this context gradients stay whole and local."""
        return self._gradient_sync(model, False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within this context backward passes reduce gradients."""
        return self._gradient_sync(model, True)

    @contextmanager
    def _gradient_sync(self, model: nn.Module, value: bool) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        model.set_requires_gradient_sync(value)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def _broadcaster(self, model: nn.Module) -> WeightBroadcaster:
        groups = groups_of(self._full_mesh)
        return WeightBroadcaster(model, self.settings.device, groups, keep_on_cpu=self.plugin.offload_to_cpu)

    def _arguments(self, ignored: set[nn.Parameter]) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.plugin.reshard_after_forward,
            "mp_policy": self.plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "ignored_params": ignored or None,
        }
        if self.plugin.offload_to_cpu:
            offload = self.plugin.cpu_offload
            pin = self.settings.device.type == "cuda"
            arguments["offload_policy"] = (
                offload if isinstance(offload, CPUOffloadPolicy) else CPUOffloadPolicy(pin_memory=pin)
            )
        return arguments


def _flat_mesh(settings: StrategySettings, plugin: FullyShardedDataParallelPlugin) -> Any:
    if not dist.is_initialized():
        raise TrainError("FSDP needs a process group; start the script with `bigmodel launch --use_fsdp`")
    if plugin.hybrid:
        machines, here = _machines(settings)
        shape, names = (machines, here), ("dp_replicate", "dp_shard")
        return init_device_mesh(settings.device.type, shape, mesh_dim_names=names)
    return init_device_mesh(settings.device.type, (settings.num_processes,), mesh_dim_names=("dp_shard",))


def _machines(settings: StrategySettings) -> tuple[int, int]:
    from bigmodel.train import environment

    here = environment.integer("LOCAL_WORLD_SIZE", settings.num_processes)
    if settings.num_processes % here:
        raise TrainError(f"hybrid sharding needs equally many processes on each machine; this one has {here}")
    return settings.num_processes // here, here


def _fsdp_dimensions(mesh: Any) -> Sequence[str] | str:
    names = tuple(name for name in mesh.mesh_dim_names if name in ("dp_replicate", "dp_shard"))
    return names if len(names) > 1 else names[0]


def _recompute_in_backward(module: nn.Module, offload: bool) -> None:
    """Have `module` save only its inputs and recompute its activations in backward."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offload:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
