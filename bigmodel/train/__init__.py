"""Train: the Accelerator and everything it prepares."""

from bigmodel.train.accelerator import Accelerator
from bigmodel.train.configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from bigmodel.train.data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from bigmodel.train.handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from bigmodel.train.operations import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from bigmodel.train.optimizer import AcceleratedOptimizer
from bigmodel.train.scheduler import AcceleratedScheduler
from bigmodel.train.seeding import set_seed, synchronize_rng_state, synchronize_rng_states
from bigmodel.train.state import AcceleratorState, GradientState, PartialState
from bigmodel.train.types import DDPCommunicationHookType, DistributedType, LoggerType, PrecisionType, RNGType

__all__ = [
    "AORecipeKwargs",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "BatchSamplerShard",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "IterableDatasetShard",
    "KwargsHandler",
    "LoggerType",
    "PartialState",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SeedableRandomSampler",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "prepare_data_loader",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
