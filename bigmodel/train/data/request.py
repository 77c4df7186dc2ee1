"""The request to prepare a data loader, and loaders rebuilt from it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train.configuration import DataLoaderConfiguration
from bigmodel.train.types import RNGType

logger = logging.getLogger(__name__)

_COPIED_SETTINGS = (
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


_DATA_PARALLEL = ("dp_replicate", "dp_shard", "dp", "fsdp")


@dataclass
class LoaderRequest:
    """A user's loader and how to prepare it.

    Attributes:
        loader: the user's loader.
        config: how its data is shared among processes.
        processes, index: number of processes that share the data, and the index of this one.
        device: device that batches are moved to; None leaves them.
        rng_types: random generators to synchronise across processes.
        slice_fn: function with which process 0 slices a batch.
        common: arguments for a prepared loader of any kind.
    """

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
        """Whether a batch is split among processes."""
        return self.config.split_batches and self.processes > 1

    @property
    def whole_batch_size(self) -> int | None:
        """Samples in a batch of the user's loader."""
        size = self.loader.batch_size
        return size if size is not None else getattr(self.loader.batch_sampler, "batch_size", None)

    @property
    def share(self) -> int | None:
        """Samples in one process's batch."""
        size = self.whole_batch_size
        if size is None or not self.splits:
            return size
        if size % self.processes:
            raise TrainError(
                f"split_batches: a batch of {size} does not divide among {self.processes} processes: "
                "it must be a round multiple of them"
            )
        return size // self.processes


def can_shard(request: LoaderRequest) -> bool:
    """Whether the dataset supports `shard(num_shards, index)` for this many processes."""
    dataset: Any = request.loader.dataset
    shard = getattr(dataset, "shard", None)
    if not callable(shard) or request.loader.batch_size is None:
        return False
    if not {"num_shards", "index"} <= set(inspect.signature(shard).parameters):
        return False
    shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    return shards is None or shards >= request.processes


def data_ranks(mesh: Any) -> tuple[int, int]:
    """Return the number of a mesh's processes that read different data, and the index of this one among them."""
    count, index = 1, 0
    for dimension, name in enumerate(mesh.mesh_dim_names or ()):
        if name in _DATA_PARALLEL:
            size = int(mesh.size(dimension))
            count, index = count * size, index * size + int(mesh.get_local_rank(dimension))
    return count, index


def loader_class(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Return PyTorch's or torchdata's class of the loader."""
    return next(cls for cls in type(loader).__mro__ if cls.__module__.split(".")[0] in ("torch", "torchdata"))


def overrides_iteration(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class iterates in a way of its own."""
    return type(loader).__iter__ is not loader_class(loader).__iter__


def rebuild(request: LoaderRequest, dataset: Any, **changed: Any) -> DataLoader[Any]:
    """Return a loader over `dataset` with the request's loader settings, except for `changed`."""
    loader = request.loader
    cls = stateful_loader_class() if request.config.use_stateful_dataloader else loader_class(loader)
    if overrides_iteration(loader):
        logger.warning("%s overrides __iter__; the prepared loader does not keep that iteration", type(loader).__name__)
    known = inspect.signature(cls.__init__).parameters
    settings = {name: getattr(loader, name) for name in _COPIED_SETTINGS if name in known and hasattr(loader, name)}
    if settings.get("num_workers") == 0:
        settings.pop("prefetch_factor", None)
    if changed.get("sampler") is not None:
        changed["batch_size"] = None
    return cls(dataset, **settings, **changed)


def stateful_loader_class() -> type[DataLoader[Any]]:
    """Return torchdata's class. Raises TrainError when torchdata is not installed."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise TrainError("use_stateful_dataloader needs torchdata: pip install torchdata") from None
    return StatefulDataLoader
