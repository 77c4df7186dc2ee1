"""Which strategy a run uses, by its distributed type. Modules are imported only when chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bigmodel.train.strategies.base import Strategy
from bigmodel.train.strategies.settings import StrategySettings
from bigmodel.train.types import DistributedType

STRATEGIES: dict[DistributedType, str] = {
    DistributedType.NO: "bigmodel.train.strategies.single:SingleProcess",
    DistributedType.MULTI_CPU: "bigmodel.train.strategies.ddp:DistributedDataParallel",
    DistributedType.MULTI_GPU: "bigmodel.train.strategies.ddp:DistributedDataParallel",
    DistributedType.FSDP: "bigmodel.train.strategies.fsdp:FullyShardedDataParallel",
    DistributedType.DEEPSPEED: "bigmodel.train.strategies.deepspeed:DeepSpeed",
    DistributedType.TP: "bigmodel.train.strategies.tensor_parallel:TensorParallel",
}


def make_strategy(distributed_type: DistributedType, settings: StrategySettings) -> Strategy:
    """Return the strategy for `distributed_type`, made with `settings`."""
    strategy: Strategy = load(STRATEGIES[distributed_type])(settings)
    return strategy


PLUGINS: dict[DistributedType, str] = {
    DistributedType.FSDP: "bigmodel.train.strategies.fsdp_plugin:FullyShardedDataParallelPlugin",
    DistributedType.DEEPSPEED: "bigmodel.train.strategies.deepspeed_plugin:DeepSpeedPlugin",
}
"""The plugin that configures a strategy; made without arguments it reads the launcher's variables."""

PARALLELISM_CONFIG = "bigmodel.train.strategies.parallelism:ParallelismConfig"


def load(name: str) -> Any:
    """Import what "module:attribute" names."""
    module_name, attribute = name.split(":")
    return getattr(import_module(module_name), attribute)
