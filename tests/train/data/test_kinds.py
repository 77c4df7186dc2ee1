"""The kinds of prepared loaders, made for one of two processes without the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from bigmodel.train import DataLoaderConfiguration
from bigmodel.train.data.kinds import iterable_style, map_style
from bigmodel.train.data.request import Request

DATA = TensorDataset(torch.arange(8))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def request(loader: DataLoader[Any], index: int, **config: Any) -> Request:
    return Request(loader, DataLoaderConfiguration(**config), 2, index, None, ())


def read(prepared: Any) -> list[list[int]]:
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in prepared]


@pytest.mark.parametrize("split", [False, True])
def test_batches_of_indices_or_parts_of_them_are_dealt(split: bool) -> None:
    loader: Any = DataLoader(DATA, batch_size=4 if split else 2)
    found = [read(map_style(request(loader, index, split_batches=split))) for index in range(2)]
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_stream_that_cannot_be_cut_is_read_by_all_and_kept_in_part() -> None:
    found = [read(iterable_style(request(DataLoader(Numbers(), batch_size=2), index))) for index in range(2)]
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_shuffled_samples_without_a_batch_size_are_dealt_one_by_one() -> None:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(0))
    found = []
    for index in range(2):
        sampler.generator.manual_seed(0)
        loader: Any = DataLoader(DATA, batch_size=None, sampler=sampler)
        found.append([int(sample[0]) for sample in map_style(request(loader, index))])
    assert sorted(found[0] + found[1]) == list(range(8))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_loader_that_iterates_in_its_own_way_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        map_style(request(Own(DATA), 0))
    assert "Own iterates in its own way" in caplog.text
