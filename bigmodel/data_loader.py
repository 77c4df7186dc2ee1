"""The names of ``accelerate.data_loader``: data loaders of several processes."""

from bigmodel.train import BatchSamplerShard as BatchSamplerShard
from bigmodel.train import DataLoaderAdapter as DataLoaderAdapter
from bigmodel.train import DataLoaderDispatcher as DataLoaderDispatcher
from bigmodel.train import DataLoaderShard as DataLoaderShard
from bigmodel.train import IterableDatasetShard as IterableDatasetShard
from bigmodel.train import SeedableRandomSampler as SeedableRandomSampler
from bigmodel.train import SkipBatchSampler as SkipBatchSampler
from bigmodel.train import SkipDataLoader as SkipDataLoader
from bigmodel.train import get_sampler as get_sampler
from bigmodel.train import prepare_data_loader as prepare_data_loader
from bigmodel.train import skip_first_batches as skip_first_batches

DataLoaderStateMixin = DataLoaderShard
"""The class of prepared data loaders, under accelerate's name for their common base."""
