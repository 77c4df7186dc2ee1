"""Preparation of a `DataLoader`, so that each process reads its part of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from bigmodel.train.configuration import DataLoaderConfiguration
from bigmodel.train.data.batch_shard import BatchSamplerShard, MapSource
from bigmodel.train.data.dispatch_source import DispatchSource
from bigmodel.train.data.iterable import CountedDatasetShard, CountingCollate, IterableSource, ShardedSource
from bigmodel.train.data.loader import DataLoaderDispatcher, DataLoaderShard
from bigmodel.train.data.request import LoaderRequest, can_shard, data_ranks, overrides_iteration, rebuild
from bigmodel.train.data.samplers import SeedableRandomSampler, SharedOrder, SkipBatchSampler, shared_number
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import RNGType


def _kind(request: LoaderRequest) -> type[DataLoaderShard]:
    return DataLoaderDispatcher if request.config.dispatch_batches else DataLoaderShard


def map_style(request: LoaderRequest) -> DataLoaderShard:
    """Return a loader of this process's batches of indices."""
    loader, config = request.loader, request.config
    if overrides_iteration(loader) and request.processes == 1:
        return _kind(request)(IterableSource(loader), **request.common)
    batches, sampler = _own_sampler(request)
    on_start = SharedOrder(sampler) if _draws_by_itself(sampler, request) else None
    generator = getattr(sampler, "generator", None)
    if generator is None:
        request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    shard = BatchSamplerShard(batches, request.processes, request.index, request.splits, config.even_batches, on_start)
    batched = loader.batch_sampler is not None
    base = rebuild(request, loader.dataset, **({"batch_sampler": shard} if batched else {"sampler": shard}))
    return _kind(request)(MapSource(base, shard), generator=generator, **request.common)


def _own_sampler(request: LoaderRequest) -> tuple[Any, Any]:
    """Return the batch sampler and the sampler in it.

    They are the user's own objects, which the user may still change, except for samplers of PyTorch that must shuffle
    equally on every process; these are replaced.
    """
    loader = request.loader
    batch_sampler = loader.batch_sampler
    if batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        batch_sampler = loader.sampler  # of a dataset that takes lists of indices
    if batch_sampler is None:
        sampler = _synchronized_sampler(loader.sampler, request)
        return sampler, sampler
    return _synchronized_batches(batch_sampler, request)


def _synchronized_batches(batch_sampler: Any, request: LoaderRequest) -> tuple[Any, Any]:
    if isinstance(batch_sampler, SkipBatchSampler):
        batches, sampler = _synchronized_batches(batch_sampler.batch_sampler, request)
        return SkipBatchSampler(batches, batch_sampler.skip_batches), sampler
    original = getattr(batch_sampler, "sampler", None)
    sampler = _synchronized_sampler(original, request)
    if sampler is original or not isinstance(batch_sampler, BatchSampler):
        return batch_sampler, original
    batch_sampler = copy.copy(batch_sampler)
    batch_sampler.sampler = sampler
    return batch_sampler, sampler


def _synchronized_sampler(sampler: Any, request: LoaderRequest) -> Any:
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


def _draws_by_itself(sampler: Any, request: LoaderRequest) -> bool:
    """Whether a sampler would draw a different order in each process."""
    alone = request.processes == 1 or request.config.use_seedable_sampler
    return not alone and isinstance(sampler, RandomSampler) and sampler.generator is None


def iterable_style(request: LoaderRequest) -> DataLoaderShard:
    """Return a loader of this process's part of a stream: a shard of the dataset if it supports sharding."""
    loader, config = request.loader, request.config
    drop_last = bool(loader.drop_last)
    request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    if request.processes == 1:
        plain = config.use_stateful_dataloader and not hasattr(loader, "load_state_dict")
        base = rebuild(request, loader.dataset, batch_size=loader.batch_size, drop_last=drop_last) if plain else loader
        return _kind(request)(IterableSource(base), **request.common)
    share = request.share
    if can_shard(request):
        own = loader.dataset.shard(num_shards=request.processes, index=request.index)  # type: ignore[attr-defined]
        base = rebuild(request, own, batch_size=share, drop_last=drop_last)
        if not (config.even_batches and dist.is_initialized()):  # without a group, processes are not in step
            return _kind(request)(IterableSource(base), **request.common)
        return _kind(request)(ShardedSource(base, _cpu_group(), _longest(base)), **request.common)
    dataset = CountedDatasetShard(
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
    return _kind(request)(IterableSource(base), **request.common)


def dispatched(request: LoaderRequest) -> DataLoaderShard:
    """Return a loader of batches that process 0 reads and sends."""
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
    """Return the largest number of batches of any process; None if datasets have no length."""
    length = len(base) if hasattr(base.dataset, "__len__") else -1
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, length)
    return None if min(lengths) < 0 else max(lengths)


def _cpu_group() -> Any:
    """Return a process group for CPU tensors that only data loaders use, created once per run."""
    shared = PartialState._shared_state
    if "data_group" not in shared:
        shared["data_group"] = dist.new_group(backend="gloo")
    return shared["data_group"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[RNGType | str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
) -> DataLoaderShard:
    """Return a loader of this process's part of the batches of `dataloader`.

    Workers are started with the start method of `dataloader`, on Linux a fork by default. A fork copies the locks that
    other threads of this process hold: a process with threads, such as a server, should use
    `DataLoader(..., multiprocessing_context="forkserver")`.

    Args:
        dataloader: a `DataLoader`, over a map-style or an iterable dataset.
        device: device that batches are moved to, with `put_on_device`; None: this process's device.
        num_processes: number of processes that share the data; None: all processes of the run.
        process_index: index of this process among them.
        put_on_device: move batches to `device`.
        rng_types: generators to synchronise at the start of each pass.
        slice_fn_for_dispatch: slices a batch on process 0: (data, slice, process_index, num_processes) -> part.
        split_batches: see `DataLoaderConfiguration`.
        dispatch_batches: see `DataLoaderConfiguration`.
        even_batches: see `DataLoaderConfiguration`.
        use_seedable_sampler: see `DataLoaderConfiguration`.
        data_seed: see `DataLoaderConfiguration`.
        non_blocking: see `DataLoaderConfiguration`.
        use_stateful_dataloader: see `DataLoaderConfiguration`.
        torch_device_mesh: the mesh of the run, instead of `num_processes` and `process_index`: only processes that
            differ in its data-parallel dimensions ("dp_replicate", "dp_shard", "dp", "fsdp") read different data.

    Raises:
        TrainError: batches that do not divide among the processes, or settings that contradict each other.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader
    state = PartialState()
    config = DataLoaderConfiguration(
        split_batches,
        dispatch_batches,
        even_batches,
        use_seedable_sampler,
        data_seed,
        non_blocking,
        use_stateful_dataloader,
    )
    if torch_device_mesh is not None:
        num_processes, process_index = data_ranks(torch_device_mesh)
    target = (device or state.device) if put_on_device else None
    request = LoaderRequest(
        dataloader,
        config,
        state.num_processes if num_processes is None else num_processes,
        state.process_index if process_index is None else process_index,
        target,
        rng_types if rng_types is not None else (),
        slice_fn_for_dispatch,
    )
    return _build(request)


def _build(request: LoaderRequest) -> DataLoaderShard:
    loader, config = request.loader, request.config
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        request.processes, request.index = 1, 0  # the user has distributed the data already
    iterable = isinstance(loader.dataset, IterableDataset)
    dispatch = config.dispatch_batches
    if dispatch is None:
        dispatch = iterable and request.device is not None and not can_shard(request)
    share = request.share
    request.common = {
        "device": request.device,
        "rng_types": request.rng_types,
        "non_blocking": config.non_blocking,
        "resumes_by_itself": config.use_stateful_dataloader or hasattr(loader, "load_state_dict"),
        "batch_size": share,
        "total_batch_size": None if share is None else share * request.processes,
    }
    if dispatch and request.processes > 1:
        return dispatched(request)
    if iterable:
        return iterable_style(request)
    return map_style(request)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first `num_batches` batches of every pass, to finish an interrupted epoch.

    Of a map-style loader that is not prepared it is one that may be prepared, too; of a stream, one that this process
    reads alone.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    request = LoaderRequest(dataloader, DataLoaderConfiguration(), 1, 0, None, ())
    if isinstance(dataloader.dataset, IterableDataset) or overrides_iteration(dataloader):
        return _build(request).skipping(num_batches)
    if dataloader.batch_sampler is None:
        return rebuild(request, dataloader.dataset, sampler=SkipBatchSampler(dataloader.sampler, num_batches))
    skipping: Any = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return rebuild(request, dataloader.dataset, batch_sampler=skipping)
