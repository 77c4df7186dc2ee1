"""Prepared loaders of every kind: two processes share a dataset, every sample once and in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from bigmodel.errors import TrainError
from bigmodel.train import (
    DataLoaderConfiguration,
    DataLoaderDispatcher,
    DataLoaderShard,
    PartialState,
    SeedableRandomSampler,
    prepare_data_loader,
    set_seed,
    skip_first_batches,
)
from bigmodel.train.accelerator.gathering import gather_for_metrics
from bigmodel.train.collectives import gather_object
from bigmodel.train.data.prepare import iterable_style, map_style
from bigmodel.train.data.request import LoaderRequest
from tests.train.multiprocess import on_ranks, run_on_ranks


class Stream(IterableDataset[int]):
    """Numbers, and a count of those that this process read."""

    def __init__(self, length: int) -> None:
        self.numbers = range(length)
        self.read = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            self.read += 1
            yield number


class Shardable(Stream):
    """Can give each process its part. Parts differ in length."""

    num_shards = 4
    parts: list[Stream]

    def shard(self, num_shards: int, index: int) -> Stream:
        part = Stream(0)
        cut = len(self.numbers) * 2 // 3
        part.numbers = [self.numbers[:cut], self.numbers[cut:]][index]
        assert num_shards == 2
        self.parts = [part]
        return part


def samples(prepared: DataLoaderShard) -> list[int]:
    """Gather a pass as a metric would."""
    found: list[int] = []
    for batch in prepared:
        found += gather_for_metrics(batch).tolist()
    assert len({*gather_object([len(prepared)])}) == 1
    return found


def prepared(dataset: Any, size: int, **options: Any) -> DataLoaderShard:
    drop_last = options.pop("drop_last", False)
    workers = options.pop("num_workers", 0)
    loader = DataLoader(dataset, batch_size=size, drop_last=drop_last, num_workers=workers)
    return prepare_data_loader(loader, put_on_device=True, **options)


@pytest.mark.slow
@on_ranks
def test_map_style_batches_are_shared() -> None:
    for length in range(1, 14):
        for split in (False, True):
            assert samples(prepared(range(length), 4, split_batches=split)) == list(range(length))


@on_ranks
def test_uneven_batches_are_shared_where_both_have_one() -> None:
    loader = prepared(range(7), 4, even_batches=False)
    assert samples(loader) == list(range(7))
    assert [len(batch) for batch in loader] == [4 - PartialState().process_index]


@pytest.mark.slow
@on_ranks
def test_an_iterable_dataset_is_read_by_all_when_it_cannot_be_shared() -> None:
    for length in range(1, 14):
        for split in (False, True):
            loader = prepared(Stream(length), 4, dispatch_batches=False, split_batches=split)
            assert samples(loader) == list(range(length))
    whole = prepared(Stream(11), 2, dispatch_batches=False, drop_last=True)
    assert samples(whole) == list(range(8))


@pytest.mark.slow
@on_ranks
def test_a_shardable_dataset_is_read_in_parts() -> None:
    for length in (2, 7, 9, 12):
        dataset = Shardable(length)
        loader = prepared(dataset, 2)
        found = samples(loader)
        assert sorted(found) == list(range(length))
        assert dataset.parts[0].read == len(dataset.parts[0].numbers)
        assert len(list(loader)) == len(loader)


@on_ranks
def test_a_part_without_any_batch_is_an_error_on_every_process() -> None:
    with pytest.raises(TrainError, match="no batch at all"):
        list(prepared(Shardable(1), 2))


@pytest.mark.slow
@on_ranks
def test_process_0_reads_for_all_by_default_where_a_dataset_cannot_be_shared() -> None:
    for length in range(1, 14):
        for split in (False, True):
            dataset = Stream(length)
            loader = prepared(dataset, 4, split_batches=split)
            assert samples(loader) == list(range(length))
            assert dataset.read == (length if PartialState().is_main_process else 0)
    assert samples(prepared(Stream(11), 2, drop_last=True)) == list(range(8))


def read_by_workers() -> None:
    assert samples(prepared(range(11), 2, num_workers=1)) == list(range(11))
    assert samples(prepared(Stream(9), 2, dispatch_batches=False, num_workers=1)) == list(range(9))
    assert samples(prepared(range(9), 2, dispatch_batches=True, num_workers=1)) == list(range(9))


@pytest.mark.slow
def test_worker_processes_read_for_every_kind_of_loader() -> None:
    # In ranks of their own: workers are forked, and a fork copies locks that threads of other tests may hold.
    run_on_ranks(read_by_workers, modules=(__name__,))


@on_ranks
def test_what_process_0_sends_may_be_nested_and_hold_strings() -> None:
    rows = [{"x": torch.tensor([float(i)]), "name": f"row {i}", "pair": (i, torch.tensor(i))} for i in range(5)]

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    names: list[str] = []
    values: list[float] = []
    for batch in prepare_data_loader(DataLoader(Rows(), batch_size=2), put_on_device=True):
        names += gather_for_metrics(batch["name"])
        values += gather_for_metrics(batch["x"])[:, 0].tolist()
    assert names == [f"row {i}" for i in range(5)]
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]


@on_ranks
def test_an_error_of_process_0_while_reading_reaches_every_process() -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise OSError("disk gone")

    loader = prepare_data_loader(DataLoader(Broken(), batch_size=1), put_on_device=True)
    expected = OSError if PartialState().is_main_process else TrainError
    with pytest.raises(expected, match="disk gone"):
        list(loader)


@pytest.mark.slow
@on_ranks
def test_a_loop_left_early_leaves_the_processes_in_step() -> None:
    for dataset in (range(20), Stream(20), Shardable(20)):
        loader = prepared(dataset, 2)
        for number, _ in enumerate(loader):
            if number == 1:
                break
        assert sorted(samples(loader)) == list(range(20))


@on_ranks
def test_both_processes_shuffle_as_one_would() -> None:
    set_seed(4)
    expected = list(RandomSampler(range(10)))
    set_seed(4 + PartialState().process_index)
    torch.empty((), dtype=torch.int64).random_()  # what a loader draws first, for its workers
    shuffled = prepare_data_loader(DataLoader(range(10), batch_size=2, shuffle=True))
    set_seed(4 + PartialState().process_index)
    found = samples(shuffled)
    set_seed(4)
    torch.empty((), dtype=torch.int64).random_()
    assert found == list(RandomSampler(range(10)))
    assert sorted(found) == sorted(expected)


@on_ranks
def test_seedable_shuffling_agrees_although_processes_are_seeded_apart() -> None:
    set_seed(10 + PartialState().process_index)
    loader = prepare_data_loader(DataLoader(range(10), batch_size=2, shuffle=True), use_seedable_sampler=True)
    assert samples(loader) == list(SeedableRandomSampler(range(10), data_seed=10))


@on_ranks
def test_a_user_s_generator_is_synchronised() -> None:
    generator = torch.Generator().manual_seed(PartialState().process_index)
    loader = DataLoader(range(10), batch_size=2, sampler=RandomSampler(range(10), generator=generator))
    assert samples(prepare_data_loader(loader, rng_types=["generator"])) == list(
        RandomSampler(range(10), generator=torch.Generator().manual_seed(0))
    )


@on_ranks
def test_a_dataset_the_user_has_dealt_is_not_dealt_again() -> None:
    rank = PartialState().process_index
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=False)
    loader = prepare_data_loader(DataLoader(range(8), batch_size=2, sampler=sampler))
    assert torch.cat(list(loader)).tolist() == list(range(rank, 8, 2))


@on_ranks
def test_a_batch_that_does_not_divide_is_refused() -> None:
    for dataset in (range(10), Stream(10)):
        with pytest.raises(TrainError, match="a batch of 5 does not divide among 2 processes"):
            list(prepared(dataset, 5, split_batches=True, dispatch_batches=False))


DATA = TensorDataset(torch.arange(8))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def request(loader: DataLoader[Any], index: int, **config: Any) -> LoaderRequest:
    return LoaderRequest(loader, DataLoaderConfiguration(**config), 2, index, None, ())


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


@on_ranks
def test_batches_drawn_by_a_sampler_are_drawn_alike_by_all() -> None:
    torch.manual_seed(PartialState().process_index)
    batches: Any = BatchSampler(RandomSampler(range(22)), batch_size=4, drop_last=False)
    loader: Any = DataLoader(Lists(), sampler=batches, batch_size=None)
    mine = [sample for batch in prepare_data_loader(loader, even_batches=False) for sample in batch.tolist()]
    assert sorted(gather_object(mine)) == list(range(22))


class Lists(Dataset[Any]):
    """Takes lists of indices."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)

    def __len__(self) -> int:
        return 22


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_loader_that_iterates_in_its_own_way_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        map_style(request(Own(DATA), 0))
    assert "Own overrides __iter__" in caplog.text


@on_ranks
def test_a_loader_that_skips_batches_is_shared_when_it_is_prepared() -> None:
    loader: Any = DataLoader(range(12), batch_size=2)
    ours = [batch.tolist() for batch in prepare_data_loader(skip_first_batches(loader, 2))]
    rank = PartialState().process_index
    assert ours == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]][rank]


@on_ranks
def test_shuffled_batches_after_skipped_ones_are_drawn_alike_by_all() -> None:
    torch.manual_seed(PartialState().process_index)
    for seedable in (False, True):
        loader: Any = skip_first_batches(DataLoader(range(16), batch_size=2, shuffle=True), 2)
        prepared = prepare_data_loader(loader, use_seedable_sampler=seedable, rng_types=["generator"])
        mine = [sample for batch in prepared for sample in batch.tolist()]
        assert len(set(gather_object(mine))) == 12


def test_a_part_of_a_shardable_dataset_may_be_read_without_the_other_processes() -> None:
    loader: Any = DataLoader(Shardable(9), batch_size=5)
    part = prepare_data_loader(loader, num_processes=2, process_index=1)
    assert [batch.tolist() for batch in part] == [[6, 7, 8]]


def test_one_process_alone_reads_what_it_is_to_dispatch() -> None:
    prepared = prepare_data_loader(DataLoader(range(4), batch_size=2), dispatch_batches=True)
    assert isinstance(prepared, DataLoaderDispatcher)
    assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3]]
