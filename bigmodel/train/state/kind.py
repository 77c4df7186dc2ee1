"""What kind of training a run is, from the plugins given to the Accelerator and the launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.strategies.selection import PARALLELISM_CONFIG, PLUGINS, load
from bigmodel.train.types import DistributedType


@dataclass
class Plugins:
    """The plugins given to the Accelerator.

    `deepspeed` may be one plugin or several by name, of which the first is active.
    """

    deepspeed: Any = None
    fsdp: Any = None
    tensor_parallel: Any = None
    megatron_lm: Any = None
    parallelism_config: Any = None


@dataclass
class Kind:
    """The distributed type of the run, its plugin, and its `ParallelismConfig`."""

    distributed_type: DistributedType
    plugin: Any = None
    parallelism_config: Any = None


def choose_kind(processes: DistributedType, plugins: Plugins) -> Kind:
    """Decide the kind of run. `processes` is the type that follows from the number of processes alone.

    Raises:
        TrainError: two strategies at once, or one that is not supported (the message names the alternative).
    """
    _refuse_unsupported(plugins)
    parallelism = plugins.parallelism_config
    if parallelism is None and environment.flag(environment.USE_PARALLELISM_CONFIG):
        parallelism = load(PARALLELISM_CONFIG)()
    deepspeed = _given_or_launched(plugins.deepspeed, environment.USE_DEEPSPEED, DistributedType.DEEPSPEED)
    fsdp = _given_or_launched(plugins.fsdp, environment.USE_FSDP, DistributedType.FSDP)
    if plugins.deepspeed is not None and plugins.fsdp is not None:
        raise TrainError("both deepspeed_plugin and fsdp_plugin are given; a run uses one of them")
    if deepspeed is not None and plugins.fsdp is None:
        return Kind(DistributedType.DEEPSPEED, deepspeed, parallelism)
    if fsdp is not None:
        return Kind(DistributedType.FSDP, fsdp, parallelism)
    if getattr(parallelism, "dp_shard_size", 1) > 1:
        return Kind(DistributedType.FSDP, load(PLUGINS[DistributedType.FSDP])(), parallelism)
    if plugins.tensor_parallel is not None or getattr(parallelism, "tp_size", 1) > 1:
        return Kind(DistributedType.TP, plugins.tensor_parallel, parallelism)
    return Kind(processes, None, parallelism)


def _given_or_launched(given: Any, variable: str, kind: DistributedType) -> Any:
    if isinstance(given, Mapping):
        given = dict(given)
    if given is None and environment.flag(variable):
        return load(PLUGINS[kind])()
    return given


def _refuse_unsupported(plugins: Plugins) -> None:
    if plugins.megatron_lm is not None or environment.flag(environment.USE_MEGATRON_LM):
        raise TrainError(
            "Megatron-LM is not supported; use FSDP2 (fsdp_plugin), tensor parallelism (parallelism_config) or both"
        )
    if environment.flag(environment.USE_SAGEMAKER):
        raise TrainError("SageMaker is not supported; start the script with torchrun or `bigmodel launch` instead")
    if environment.text("PJRT_DEVICE", "").upper() == "TPU" or environment.flag("ACCELERATE_USE_TPU"):
        raise TrainError("TPUs are not supported; train on CUDA GPUs, MPS or the CPU")
