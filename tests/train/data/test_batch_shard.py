"""BatchSamplerShard: the processes' real samples together are the sampler's, in order; the last batch is marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from bigmodel.errors import TrainError
from bigmodel.train import BatchSamplerShard
from bigmodel.train.data.batch_shard import BatchStream, IndexBatch, MapSource


def read(shard: BatchSamplerShard) -> list[tuple[list[int], int, bool]]:
    """Return (indices, how many are real, whether it was known to be the last) of every batch of a pass."""
    stream = iter(shard)
    found = []
    for batch in stream:
        note = stream.pending.popleft()
        found.append((list(batch), note.real, stream.exhausted and stream.produced == len(found) + 1))
    return found


def shards(samples: int, size: int, processes: int, **options: Any) -> list[BatchSamplerShard]:
    drop_last = options.pop("drop_last", False)
    return [
        BatchSamplerShard(BatchSampler(range(samples), size, drop_last), processes, rank, **options)
        for rank in range(processes)
    ]


SETTINGS = {
    "samples": st.integers(1, 60),
    "share": st.integers(1, 5),
    "processes": st.integers(1, 5),
    "split": st.booleans(),
    "even": st.booleans(),
}


@given(**SETTINGS)
def test_every_sample_is_real_once_and_in_order(
    samples: int, share: int, processes: int, split: bool, even: bool
) -> None:
    size = share * processes if split else share
    passes = [read(s) for s in shards(samples, size, processes, split_batches=split, even_batches=even)]
    rounds = max(len(given) for given in passes)
    real = [
        index
        for number in range(rounds)
        for given in passes
        if number < len(given)
        for index in given[number][0][: given[number][1]]
    ]
    assert real == list(range(samples))


@given(**SETTINGS, drop_last=st.booleans())
def test_length_and_last_batch_are_right(
    samples: int, share: int, processes: int, split: bool, even: bool, drop_last: bool
) -> None:
    size = share * processes if split else share
    options = {"split_batches": split, "even_batches": even, "drop_last": drop_last}
    for shard in shards(samples, size, processes, **options):
        given = read(shard)
        assert len(shard) == len(given)
        assert [last for _, _, last in given] == [number == len(given) - 1 for number in range(len(given))]


@given(samples=SETTINGS["samples"], share=SETTINGS["share"], processes=SETTINGS["processes"], split=st.booleans())
def test_even_batches_have_one_number_and_one_size(samples: int, share: int, processes: int, split: bool) -> None:
    size = share * processes if split else share
    passes = [read(shard) for shard in shards(samples, size, processes, split_batches=split)]
    assert len({len(given) for given in passes}) == 1
    if processes > 1:
        assert {len(indices) for given in passes for indices, _, _ in given} == {share}


def test_the_last_round_is_filled_with_samples_of_the_first() -> None:
    first, second = (read(shard) for shard in shards(10, 4, 2))
    assert first == [([0, 1, 2, 3], 4, False), ([8, 9, 0, 1], 2, True)]
    assert second == [([4, 5, 6, 7], 4, False), ([2, 3, 4, 5], 0, True)]


def test_a_dataset_smaller_than_one_batch_is_repeated() -> None:
    assert [read(shard) for shard in shards(1, 3, 2)] == [[([0, 0, 0], 1, True)], [([0, 0, 0], 0, True)]]


def test_drop_last_leaves_out_the_incomplete_round_on_every_process() -> None:
    assert [read(shard) for shard in shards(12, 4, 2, drop_last=True)] == [
        [([0, 1, 2, 3], 4, True)],
        [([4, 5, 6, 7], 4, True)],
    ]


def test_batches_of_varying_size_are_dealt_whole() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    first, second = (read(BatchSamplerShard(batches, 2, rank)) for rank in range(2))
    assert [indices for indices, _, _ in first] == [[0], [3, 4, 5], [7, 8]]
    assert second == [([1, 2], 2, False), ([6], 1, False), ([0], 0, True)]


def test_batches_of_varying_size_are_repeated_from_the_first_on() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6]]
    last = [read(BatchSamplerShard(batches, 3, rank))[-1] for rank in range(3)]
    assert last == [([6], 1, True), ([0], 0, True), ([1, 2], 0, True)]


def test_skipping_leaves_out_this_process_s_first_batches() -> None:
    shard = shards(20, 2, 2)[1]
    shard.skip = 3
    assert [indices for indices, _, _ in read(shard)] == [[14, 15], [18, 19]]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(TrainError, match="a batch of 5 does not divide among 2 processes"):
        shards(10, 5, 2, split_batches=True)


def test_splitting_batches_of_unknown_size_is_refused() -> None:
    with pytest.raises(TrainError, match="batch_size"):
        BatchSamplerShard([[0, 1], [2]], 2, 0, split_batches=True)


def batches(count: int) -> Iterator[IndexBatch]:
    return (IndexBatch([number], 1, 1, False, 1) for number in range(count))


def test_the_last_batch_is_known_as_such() -> None:
    stream = BatchStream(batches(3), 0, None)
    assert [(batch, stream.exhausted) for batch in stream] == [([0], False), ([1], False), ([2], True)]
    assert stream.produced == 3


def test_batches_are_skipped_and_an_empty_pass_ends_at_once() -> None:
    assert list(BatchStream(batches(3), 2, None)) == [[2]]
    for stream in (BatchStream(batches(3), 5, None), BatchStream(batches(0), 0, None)):
        assert not stream.exhausted  # nothing is read before the pass starts
        assert list(stream) == []
        assert stream.exhausted


def test_the_order_is_drawn_once_when_the_pass_starts() -> None:
    drawn: list[str] = []
    stream = BatchStream(batches(2), 0, lambda: drawn.append("now"))
    assert drawn == []
    stream.start()
    assert list(stream) == [[0], [1]]
    assert drawn == ["now"]


def test_what_is_known_of_each_batch_waits_to_be_read_in_order() -> None:
    stream = BatchStream(iter([IndexBatch([4, 5], 2, 1, True, 3)]), 0, None)
    list(stream)
    assert list(stream.pending) == [IndexBatch(None, 2, 1, True, 3)]


def source(index: int) -> MapSource:
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    shard = BatchSamplerShard(loader.batch_sampler, 2, index)
    return MapSource(DataLoader(loader.dataset, batch_sampler=shard), shard)


def test_the_last_batch_is_known_as_such_and_its_own_samples_are_counted() -> None:
    steps = [list(source(index).open(0)) for index in range(2)]
    assert [[step.last for step in own] for own in steps] == [[False, True]] * 2
    assert [[step.real if step.uneven else 2 for step in own] for own in steps] == [[2, 2], [2, 1]]
    assert {own[-1].total_real for own in steps} == {3}


def test_batches_are_skipped_without_being_read() -> None:
    (step,) = source(0).open(1)
    assert step.batch[0].tolist() == [4, 5]
    assert len(source(0)) == 2
