"""Turning a `DataLoader` into one that gives each process its part."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from bigmodel.errors import TrainError
from bigmodel.train.configuration import DataLoaderConfiguration
from bigmodel.train.data.batch_shard import BatchSamplerShard
from bigmodel.train.data.dispatch_source import DispatchSource
from bigmodel.train.data.iterable_shard import CountingCollate, IterableDatasetShard
from bigmodel.train.data.iterable_source import IterableSource
from bigmodel.train.data.loader import DataLoaderDispatcher, DataLoaderShard
from bigmodel.train.data.samplers import SeedableRandomSampler, SharedOrder, shared_number
from bigmodel.train.data.sharded_source import ShardedSource
from bigmodel.train.data.steps import MapSource
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import RNGType

logger = logging.getLogger(__name__)

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


@dataclass
class _Request:
    """A loader to prepare, and how."""

    loader: DataLoader[Any]
    config: DataLoaderConfiguration
    processes: int
    index: int
    device: torch.device | None
    rng_types: Sequence[RNGType | str]
    slice_fn: Callable[..., Any] | None = None
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> bool:
        return self.config.split_batches and self.processes > 1

    @property
    def whole_batch_size(self) -> int | None:
        size = self.loader.batch_size
        return size if size is not None else getattr(self.loader.batch_sampler, "batch_size", None)

    @property
    def share(self) -> int | None:
        """Samples in one process's batch."""
        size = self.whole_batch_size
        if size is None or not self.splits:
            return size
        if size % self.processes:
            raise TrainError(f"split_batches: a batch of {size} does not divide among {self.processes} processes")
        return size // self.processes


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
) -> DataLoaderShard:
    """Return a loader that gives this process its part of what `dataloader` gives.

    Args:
        dataloader: a `DataLoader`, over a map-style or an iterable dataset.
        device: where batches go, if `put_on_device`; this process's device by default.
        num_processes, process_index: how many share the data, and which this is; those of the run by default.
        rng_types: generators to synchronise at the start of each pass.
        slice_fn_for_dispatch: how process 0 cuts a batch: (data, slice, process_index, num_processes) -> part.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking,
            use_stateful_dataloader: see `DataLoaderConfiguration`.

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
    target = (device or state.device) if put_on_device else None
    request = _Request(
        dataloader,
        config,
        state.num_processes if num_processes is None else num_processes,
        state.process_index if process_index is None else process_index,
        target,
        rng_types if rng_types is not None else (),
        slice_fn_for_dispatch,
    )
    return _prepare(request)


def _prepare(request: _Request) -> DataLoaderShard:
    loader, config = request.loader, request.config
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        request.processes, request.index = 1, 0  # the user has dealt the data already
    iterable = isinstance(loader.dataset, IterableDataset)
    dispatch = config.dispatch_batches
    if dispatch is None:
        dispatch = iterable and request.device is not None and not _can_shard(request)
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
        return _dispatched(request)
    if iterable:
        return _iterable(request)
    return _map_style(request)


def _map_style(request: _Request) -> DataLoaderShard:
    loader, config = request.loader, request.config
    if type(loader).__iter__ is not _loader_class(loader).__iter__ and request.processes == 1:
        return DataLoaderShard(IterableSource(loader), **request.common)
    batches, sampler = _own_sampler(request)
    on_start = None
    if isinstance(sampler, RandomSampler) and sampler.generator is None and not config.use_seedable_sampler:
        on_start = SharedOrder(sampler) if request.processes > 1 else None
    generator = getattr(sampler, "generator", None)
    if generator is None:
        request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    shard = BatchSamplerShard(batches, request.processes, request.index, request.splits, config.even_batches, on_start)
    batched = loader.batch_sampler is not None
    base = _rebuild(request, loader.dataset, **({"batch_sampler": shard} if batched else {"sampler": shard}))
    return DataLoaderShard(MapSource(base, shard), generator=generator, **request.common)


def _own_sampler(request: _Request) -> tuple[Any, Any]:
    """Return (what gives batches of indices, the sampler in it), copies that may be changed."""
    loader, config = request.loader, request.config
    batch_sampler = copy.copy(loader.batch_sampler)
    inner = getattr(batch_sampler, "sampler", None) if batch_sampler is not None else loader.sampler
    sampler = copy.copy(inner)
    if config.use_seedable_sampler and type(sampler) is RandomSampler:
        seed = torch.initial_seed() if config.data_seed is None else config.data_seed
        sampler = SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,
            data_seed=shared_number(seed % 2**63) if request.processes > 1 else seed,
        )
    if batch_sampler is None:
        return sampler, sampler
    if isinstance(batch_sampler, BatchSampler) and sampler is not None:
        batch_sampler.sampler = sampler
        return batch_sampler, sampler
    return batch_sampler, inner


def _iterable(request: _Request) -> DataLoaderShard:
    loader, config = request.loader, request.config
    drop_last = bool(loader.drop_last)
    request.common["rng_types"] = [name for name in request.rng_types if name != RNGType.GENERATOR]
    if request.processes == 1:
        plain = config.use_stateful_dataloader and not hasattr(loader, "load_state_dict")
        base = _rebuild(request, loader.dataset, batch_size=loader.batch_size, drop_last=drop_last) if plain else loader
        return DataLoaderShard(IterableSource(base), **request.common)
    share = request.share
    if _can_shard(request):
        own = loader.dataset.shard(num_shards=request.processes, index=request.index)  # type: ignore[attr-defined]
        base = _rebuild(request, own, batch_size=share, drop_last=drop_last)
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
    base = _rebuild(request, dataset, batch_size=share, drop_last=drop_last)
    base.collate_fn = CountingCollate(base.collate_fn)
    return DataLoaderShard(IterableSource(base), **request.common)


def _dispatched(request: _Request) -> DataLoaderShard:
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


def _can_shard(request: _Request) -> bool:
    """Whether the dataset says that it can give each process its part."""
    dataset: Any = request.loader.dataset
    shard = getattr(dataset, "shard", None)
    if not callable(shard) or request.loader.batch_size is None:
        return False
    if not {"num_shards", "index"} <= set(inspect.signature(shard).parameters):
        return False
    pieces = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    return pieces is None or pieces >= request.processes


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


def _loader_class(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Return PyTorch's or torchdata's class of the loader."""
    return next(cls for cls in type(loader).__mro__ if cls.__module__.split(".")[0] in ("torch", "torchdata"))


def _rebuild(request: _Request, dataset: Any, **changed: Any) -> DataLoader[Any]:
    """Return a loader with the settings of the given one, but for `changed`."""
    loader = request.loader
    cls = _stateful_class() if request.config.use_stateful_dataloader else _loader_class(loader)
    if type(loader).__iter__ is not _loader_class(loader).__iter__:
        logger.warning("%s iterates in its own way, which is not kept across processes", type(loader).__name__)
    known = inspect.signature(cls.__init__).parameters
    settings = {name: getattr(loader, name) for name in _KEPT if name in known and hasattr(loader, name)}
    if settings.get("num_workers") == 0:
        settings.pop("prefetch_factor", None)
    if changed.get("sampler") is not None:
        changed["batch_size"] = None
    return cls(dataset, **settings, **changed)


def _stateful_class() -> type[DataLoader[Any]]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise TrainError("use_stateful_dataloader needs torchdata: pip install torchdata") from None
    return StatefulDataLoader


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
    """Return a loader whose passes leave out the first `num_batches` batches, to finish an epoch."""
    if not isinstance(dataloader, DataLoaderShard):
        dataloader = prepare_data_loader(dataloader, num_processes=1, process_index=0)
    return dataloader.skipping(num_batches)
