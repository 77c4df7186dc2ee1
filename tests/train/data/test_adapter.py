"""Loaders that users construct themselves, and the sampler inside any loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from bigmodel.train.data.adapter import DataLoaderAdapter, SkipDataLoader, get_sampler
from bigmodel.train.data.prepare import prepare_data_loader


class Numbers(Dataset[int]):
    """0 to 7."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_an_adapter_is_a_data_loader_that_delegates() -> None:
    loader = DataLoaderAdapter(range(5), batch_size=2)
    assert isinstance(loader, DataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert (len(loader), loader.batch_size) == (3, 2)
    with pytest.raises(AttributeError):
        _ = loader.state_dict


def test_an_adapter_may_be_stateful() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    loader = DataLoaderAdapter(range(6), use_stateful_dataloader=True, batch_size=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest == [[2, 3], [4, 5]]


@pytest.mark.parametrize("skip", [0, 1, 3, 9])
def test_the_first_batches_are_skipped_in_every_pass(skip: int) -> None:
    loader = SkipDataLoader(range(5), skip_batches=skip, batch_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]][skip:]
    assert len(loader) == max(3 - skip, 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_sampler_is_found_in_bare_and_prepared_loaders(processes: int) -> None:
    for shuffle, kind in ((True, RandomSampler), (False, SequentialSampler)):
        loader = DataLoader(Numbers(), batch_size=2, shuffle=shuffle, generator=torch.Generator())
        prepared = prepare_data_loader(loader, num_processes=processes, process_index=0)
        assert type(get_sampler(loader)) is type(get_sampler(prepared)) is kind


def test_any_iterable_can_be_the_sampler() -> None:
    order: Any = [1, 2]
    assert get_sampler(DataLoader(Numbers(), batch_size=None, sampler=order)) is order
