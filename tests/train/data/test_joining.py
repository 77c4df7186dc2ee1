"""Rounds that are not filled up, for a while."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bigmodel.train import prepare_data_loader
from bigmodel.train.data.joining import uneven_batches


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def test_a_loader_is_as_it_was_afterwards_also_after_an_error() -> None:
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(5)), batch_size=2), None, 2, 1)
    with pytest.raises(ValueError, match="stop"), uneven_batches([loader], False):
        assert [len(batch[0]) for batch in loader] == [2]
        raise ValueError("stop")
    assert [len(batch[0]) for batch in loader] == [2, 2]
    with uneven_batches([loader], None):
        assert len(list(loader)) == 2


def test_loaders_of_streams_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), uneven_batches([prepare_data_loader(DataLoader(Numbers()))], False):
        assert "has no effect on a loader of an iterable dataset" in caplog.text
