"""The kinds of prepared loaders: of map-style datasets, of iterable ones, and those that process 0 reads for all."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from bigmodel.train.data.batch_shard import BatchSamplerShard
from bigmodel.train.data.dispatch_source import DispatchSource
from bigmodel.train.data.iterable_shard import CountingCollate, IterableDatasetShard
from bigmodel.train.data.iterable_source import IterableSource
from bigmodel.train.data.loader import DataLoaderDispatcher, DataLoaderShard
from bigmodel.train.data.request import Request, can_shard, loader_class, rebuild
from bigmodel.train.data.samplers import SeedableRandomSampler, SharedOrder, shared_number
from bigmodel.train.data.sharded_source import ShardedSource
from bigmodel.train.data.steps import MapSource
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import RNGType


def map_style(request: Request) -> DataLoaderShard:
    """Return a loader that gives this process its batches of indices."""
    loader, config = request.loader, request.config
    if type(loader).__iter__ is not loader_class(loader).__iter__ and request.processes == 1:
        return DataLoaderShard(IterableSource(loader), **request.common)
    batches, sampler = _own_sampler(request)
    on_start = SharedOrder(sampler) if _draws_by_itself(sampler, request) else None
    generator = getattr(sampler, "generator", None)
    if generator is None:
        request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    shard = BatchSamplerShard(batches, request.processes, request.index, request.splits, config.even_batches, on_start)
    batched = loader.batch_sampler is not None
    base = rebuild(request, loader.dataset, **({"batch_sampler": shard} if batched else {"sampler": shard}))
    return DataLoaderShard(MapSource(base, shard), generator=generator, **request.common)


def _own_sampler(request: Request) -> tuple[Any, Any]:
    """Return (what gives batches of indices, the sampler in it).

    They are the user's own, who may go on changing them, but for samplers of PyTorch that have to shuffle alike on
    every process: these are replaced by others.
    """
    loader = request.loader
    batch_sampler = loader.batch_sampler
    given = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    sampler = _shuffling_alike(given, request)
    if batch_sampler is None:
        return sampler, sampler
    if sampler is given or not isinstance(batch_sampler, BatchSampler):
        return batch_sampler, given
    batch_sampler = copy.copy(batch_sampler)
    batch_sampler.sampler = sampler
    return batch_sampler, sampler


def _shuffling_alike(sampler: Any, request: Request) -> Any:
    config = request.config
    if config.use_seedable_sampler and type(sampler) is RandomSampler:
        seed = torch.initial_seed() if config.data_seed is None else config.data_seed
        return SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,
            data_seed=shared_number(seed % 2**63) if request.processes > 1 else seed,
        )
    return copy.copy(sampler) if _draws_by_itself(sampler, request) else sampler


def _draws_by_itself(sampler: Any, request: Request) -> bool:
    """Whether a sampler would draw an order of its own in each process."""
    alone = request.processes == 1 or request.config.use_seedable_sampler
    return not alone and isinstance(sampler, RandomSampler) and sampler.generator is None


def iterable_style(request: Request) -> DataLoaderShard:
    """Return a loader of this process's part of a stream: a part of its own where the dataset can give one."""
    loader, config = request.loader, request.config
    drop_last = bool(loader.drop_last)
    request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    if request.processes == 1:
        plain = config.use_stateful_dataloader and not hasattr(loader, "load_state_dict")
        base = rebuild(request, loader.dataset, batch_size=loader.batch_size, drop_last=drop_last) if plain else loader
        return DataLoaderShard(IterableSource(base), **request.common)
    share = request.share
    if can_shard(request):
        own = loader.dataset.shard(num_shards=request.processes, index=request.index)  # type: ignore[attr-defined]
        base = rebuild(request, own, batch_size=share, drop_last=drop_last)
        if not config.even_batches:
            return DataLoaderShard(IterableSource(base), **request.common)
        return DataLoaderShard(ShardedSource(base, _cpu_group(), _longest(base)), **request.common)
    dataset = IterableDatasetShard(
        loader.dataset,
        request.whole_batch_size or 1,
        drop_last,
        request.processes,
        request.index,
        request.splits,
        config.even_batches,
    )
    base = rebuild(request, dataset, batch_size=share, drop_last=drop_last)
    base.collate_fn = CountingCollate(base.collate_fn)
    return DataLoaderShard(IterableSource(base), **request.common)


def dispatched(request: Request) -> DataLoaderShard:
    """Return a loader of what process 0 reads and deals."""
    loader, config = request.loader, request.config
    drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
    request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    source = DispatchSource(
        loader,
        _cpu_group(),
        request.processes,
        request.index,
        request.splits,
        config.even_batches,
        drop_last,
        request.slice_fn,
    )
    return DataLoaderDispatcher(source, **request.common)


def _longest(base: DataLoader[Any]) -> int | None:
    """Return the most batches any process has, or None where datasets have no length."""
    length = len(base) if hasattr(base.dataset, "__len__") else -1
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, length)
    return None if min(lengths) < 0 else max(lengths)


def _cpu_group() -> Any:
    """Return a process group for CPU tensors that only data loaders use, made once in a run."""
    shared = PartialState._shared_state
    if "data_group" not in shared:
        shared["data_group"] = dist.new_group(backend="gloo")
    return shared["data_group"]
