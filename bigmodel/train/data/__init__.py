"""Data loading: each process's part of the data, in an order that can be repeated."""

from bigmodel.train.data.adapter import DataLoaderAdapter, SkipDataLoader, get_sampler
from bigmodel.train.data.batch_shard import BatchSamplerShard
from bigmodel.train.data.iterable_shard import IterableDatasetShard
from bigmodel.train.data.loader import DataLoaderDispatcher, DataLoaderShard
from bigmodel.train.data.prepare import prepare_data_loader, skip_first_batches
from bigmodel.train.data.samplers import SeedableRandomSampler, SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
