"""Turning a `DataLoader` into one that gives each process its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from bigmodel.train.configuration import DataLoaderConfiguration
from bigmodel.train.data.kinds import dispatched, iterable_style, map_style
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.data.request import Request, can_shard, data_ranks
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import RNGType


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
    """Return a loader that gives this process its part of what `dataloader` gives.

    Workers are started as `dataloader` says, which forks them by default on Linux. A fork copies the locks that other
    threads of this process hold: a process that has threads of its own, as a server has, should start its workers
    from a clean one, by `DataLoader(..., multiprocessing_context="forkserver")`.

    Args:
        dataloader: a `DataLoader`, over a map-style or an iterable dataset.
        device: where batches go, if `put_on_device`; this process's device by default.
        num_processes, process_index: how many share the data, and which this is; those of the run by default.
        rng_types: generators to synchronise at the start of each pass.
        slice_fn_for_dispatch: how process 0 cuts a batch: (data, slice, process_index, num_processes) -> part.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking,
            use_stateful_dataloader: see `DataLoaderConfiguration`.
        torch_device_mesh: instead of `num_processes` and `process_index`, the mesh of the run: processes that differ
            in its data-parallel dimensions ("dp_replicate", "dp_shard", "dp", "fsdp") alone read different data.

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
    request = Request(
        dataloader,
        config,
        state.num_processes if num_processes is None else num_processes,
        state.process_index if process_index is None else process_index,
        target,
        rng_types if rng_types is not None else (),
        slice_fn_for_dispatch,
    )
    return _build(request)


def _build(request: Request) -> DataLoaderShard:
    loader, config = request.loader, request.config
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        request.processes, request.index = 1, 0  # the user has dealt the data already
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


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
    """Return a loader whose passes leave out the first `num_batches` batches, to finish an epoch."""
    if not isinstance(dataloader, DataLoaderShard):
        dataloader = prepare_data_loader(dataloader, num_processes=1, process_index=0)
    return dataloader.skipping(num_batches)
