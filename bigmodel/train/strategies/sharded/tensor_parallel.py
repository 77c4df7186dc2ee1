"""Tensor parallelism: layers split over ranks by the model's `tp_plan`, with PyTorch's parallel styles."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bigmodel.errors import TrainError
from bigmodel.train.strategies.base import StrategySettings
from bigmodel.train.strategies.sharded.placing import WeightBroadcaster, groups_of
from bigmodel.train.strategies.sharded.strategy import ShardedStrategy
from bigmodel.train.types import DistributedType

# Names of transformers' plans; the second names are those of older releases.
_STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": None,
    "replicated": None,
}


def parallelize(model: nn.Module, mesh: Any, plan: dict[str, str] | None = None) -> nn.Module:
    """Split the layers of `model` in place over the ranks of the one-dimensional `mesh`.

    Every rank must have the same weights; rank i keeps the i-th part.

    Args:
        plan: style by module name, where * stands for a number ("model.layers.*.mlp.up_proj": "colwise"); default:
            the model's own plan.

    Raises:
        TrainError: no plan, a style that is not supported, or heads that do not divide by the ranks.
    """
    styles = plan or model_plan(model)
    if not styles:
        raise TrainError(
            f"{type(model).__name__} has no tensor parallel plan; give one in TorchTensorParallelPlugin(tp_plan=...) "
            "or use FSDP"
        )
    _check_heads(model, int(mesh.size()))
    chosen: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = _style_of(name, styles)
        if style is not None and not _is_tied(module, model):
            chosen[name] = style
    if not chosen:
        raise TrainError(f"the tensor parallel plan of {type(model).__name__} names none of its modules: {styles}")
    parallelize_module(model, mesh, chosen)
    return model


def model_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a transformers model, with full module names; {} if it has none."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, style in (vars(type(module)).get("_tp_plan") or {}).items():
            plan.setdefault(prefix + key, style)
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if base and module is getattr(module, "base_model", None):
            plan.update({prefix + key: style for key, style in base.items()})
    return plan


def _style_of(name: str, styles: dict[str, str]) -> ParallelStyle | None:
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    wanted = styles.get(name) or styles.get(pattern)
    if wanted is None:
        return None
    if wanted not in _STYLES:
        raise TrainError(
            f"{name} is to be split {wanted!r}, which is not supported (supported: {', '.join(_STYLES)}); "
            "use FSDP for this model"
        )
    make = _STYLES[wanted]
    return make() if make is not None else None


def _is_tied(module: nn.Module, model: nn.Module) -> bool:
    """Whether the module's weight is tied to another module's (an embedding's); such a weight is not split."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    return any(
        other is not module and any(id(parameter) in own for parameter in other.parameters(recurse=False))
        for other in model.modules()
    )


def _check_heads(model: nn.Module, ranks: int) -> None:
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise TrainError(f"{field} {heads} of {type(model).__name__} does not divide by tp_size {ranks}")


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
        """Broadcast rank 0's weights to every rank, then split the layers of the plan."""
        WeightBroadcaster(model, self.settings.device, groups_of(self.mesh)).place(model)
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
