"""One class around PyTorch's `DataLoader` or torchdata's `StatefulDataLoader`, and one that skips batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from bigmodel.train.data.request import stateful_loader_class


class DataLoaderAdapter(DataLoader[Any]):
    """A `DataLoader` by type, which delegates to `base_dataloader`.

    Args:
        dataset: the dataset.
        use_stateful_dataloader: `base_dataloader` is torchdata's, with `state_dict` and `load_state_dict`.
        batch_sampler: batch sampler of `base_dataloader`.
        kwargs: further arguments of `base_dataloader`.

    Raises:
        TrainError: a stateful loader is requested, and torchdata is not installed.
    """

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        # DataLoader.__init__ is not called, since this class delegates to `base_dataloader`.
        kind: Any = stateful_loader_class() if use_stateful_dataloader else DataLoader
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = kind(dataset, batch_sampler=batch_sampler, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of `base_dataloader` where that is not PyTorch's own: callers ask for it by `isinstance`."""
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None or type(base) is DataLoader else type(base)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.base_dataloader)


class SkipDataLoader(DataLoaderAdapter):
    """Skips the first `skip_batches` batches of every pass.

    It reads them nevertheless; `skip_first_batches` does not, if the dataset can be indexed.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any):
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__(), self.skip_batches, None)


def get_sampler(dataloader: DataLoader[Any]) -> Sampler[Any] | None:
    """Return the sampler of a loader, prepared or not; None for an iterable dataset."""
    if getattr(dataloader, "base_dataloader", None) is not None:
        dataloader = dataloader.base_dataloader  # type: ignore[attr-defined]
    sampler: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    while not isinstance(sampler, BatchSampler) and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)
