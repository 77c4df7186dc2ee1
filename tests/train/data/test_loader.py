"""DataLoaderShard on one process: same batches as the source loader, resumable position, repeatable order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bigmodel.train import DataLoaderShard, GradientState, prepare_data_loader, skip_first_batches
from bigmodel.train.data.loader import LoaderProgress

from ...examples import alike


class Noisy(Dataset[torch.Tensor]):
    """A dataset whose transform draws from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand()])


class Stream(IterableDataset[int]):
    def __init__(self, length: int = 7) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def seeded() -> None:
    torch.manual_seed(3)
    np.random.seed(3)


@pytest.mark.slow
@alike("workers", [0, 1], first=1)
def test_batches_and_draws_are_those_of_the_bare_loader(workers: int) -> None:
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers)
    seeded()
    expected = [batch + torch.rand(()) for _ in range(2) for batch in loader]
    prepared = prepare_data_loader(loader)
    seeded()
    assert equal([batch + torch.rand(()) for _ in range(2) for batch in prepared], expected)


@pytest.mark.slow
@alike(
    "loader",
    [
        DataLoader(range(10), batch_size=3),
        DataLoader(range(9), batch_size=3, drop_last=True),
        DataLoader(range(5), batch_size=None),
        DataLoader(range(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]),
        DataLoader(range(6), batch_size=2, sampler=WeightedRandomSampler([1.0] * 6, 5)),
        DataLoader(Stream(), batch_size=3),
        DataLoader(Stream(), batch_size=None),
        DataLoader(range(10), batch_size=3, num_workers=2),
    ],
    first=7,
    ids=["map", "drop_last", "unbatched", "batch_sampler", "weighted", "iterable", "iterable_unbatched", "workers"],
)
def test_the_last_batch_is_known_when_it_is_given(loader: DataLoader[Any]) -> None:
    prepared = prepare_data_loader(loader)
    ends = [prepared.end_of_dataloader for _ in prepared]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert len(ends) == len(list(loader))
    assert not prepared.end_of_dataloader


def test_it_is_a_data_loader_with_the_attributes_of_the_one_inside() -> None:
    dataset = TensorDataset(torch.arange(8))
    prepared = prepare_data_loader(DataLoader(dataset, batch_size=2, num_workers=0))
    assert isinstance(prepared, DataLoader)
    assert prepared.dataset is dataset
    assert (prepared.batch_size, prepared.total_batch_size, prepared.total_dataset_length) == (2, 2, 8)
    assert len(prepared) == 4


def test_preparing_twice_changes_nothing() -> None:
    prepared = prepare_data_loader(DataLoader(range(4)))
    assert prepare_data_loader(prepared) is prepared


def test_a_subclass_that_iterates_its_own_way_is_kept() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    prepared = prepare_data_loader(Doubling(range(4), batch_size=2))
    assert equal(list(prepared), [torch.tensor([0, 2]), torch.tensor([4, 6])])


def test_the_state_knows_the_innermost_loader_until_it_is_left() -> None:
    state = GradientState()
    outer, inner = (prepare_data_loader(DataLoader(range(3))) for _ in range(2))
    for _ in outer:
        for _ in inner:
            assert state.active_dataloader is inner
            break
        assert state.active_dataloader is outer
    assert state.active_dataloader is None
    with pytest.raises(ZeroDivisionError):
        for _ in outer:
            raise ZeroDivisionError
    assert not state.in_dataloader


def test_epochs_are_counted_and_told() -> None:
    class Told(Dataset[int]):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            return index

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told()
    prepared = prepare_data_loader(DataLoader(dataset))
    list(prepared)
    list(prepared)
    prepared.set_epoch(7)
    list(prepared)
    assert dataset.epochs == [0, 1, 7, 7]
    assert prepared.iteration == 8


def test_skipping_leaves_out_the_first_batches_and_finishes_the_epoch() -> None:
    prepared = prepare_data_loader(DataLoader(range(7), batch_size=2))
    rest = skip_first_batches(prepared, 2)
    assert len(rest) == 2
    assert [batch.tolist() for batch in rest] == [[4, 5], [6]]
    assert prepared.iteration == 1
    assert len(list(prepared)) == 4


@pytest.mark.parametrize("loader", [DataLoader(Stream(), batch_size=2), DataLoader(range(7), batch_size=2)])
def test_skipping_works_on_a_bare_loader(loader: DataLoader[Any]) -> None:
    assert [batch.tolist() for batch in skip_first_batches(loader, 3)] == [[6]]


def test_seedable_shuffling_does_not_touch_the_global_generator() -> None:
    def epochs() -> list[Any]:
        prepared = prepare_data_loader(
            DataLoader(range(9), batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=1
        )
        return [torch.cat(list(prepared)).tolist() for _ in range(2)]

    torch.manual_seed(0)
    first = epochs()
    torch.manual_seed(1)
    assert epochs() == first
    assert first[0] != first[1]


@alike(
    ("taken", "workers", "seedable"),
    [
        *((taken, 0, seedable) for taken in (1, 2, 4) for seedable in (False, True)),
        *((2, 1, seedable) for seedable in (False, True)),
    ],
    first=6,
)
def test_an_interrupted_pass_is_continued_in_its_order(taken: int, workers: int, seedable: bool) -> None:
    def loader() -> DataLoaderShard:
        bare = DataLoader(range(11), batch_size=3, shuffle=True, num_workers=workers)
        return prepare_data_loader(bare, use_seedable_sampler=seedable)

    torch.manual_seed(5)
    original = loader()
    list(original)
    rest = []
    for number, batch in enumerate(original, 1):
        if number > taken:
            rest.append(batch)
        if number == taken:
            state, generator = original.state_dict(), torch.get_rng_state()
    following = list(original)

    torch.manual_seed(5)  # the seed of a seedable sampler is given when it is made
    resumed = loader()
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert equal(list(skip_first_batches(resumed, taken)), rest)
    assert equal(list(resumed), following)


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("make", [lambda: Stream(10), lambda: range(10)], ids=["iterable", "map"])
def test_a_state_saved_at_the_last_batch_continues_with_the_next_epoch(
    make: Any, stateful: bool, seedable: bool
) -> None:
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    dataset = make()
    shuffle = not isinstance(dataset, IterableDataset)

    def loader() -> DataLoaderShard:
        bare = DataLoader(dataset, batch_size=2, shuffle=shuffle)
        return prepare_data_loader(
            bare, use_seedable_sampler=seedable, data_seed=3 if seedable else None, use_stateful_dataloader=stateful
        )

    torch.manual_seed(5)
    original = loader()
    for _ in original:
        if original.end_of_dataloader:
            state, generator = original.state_dict(), torch.get_rng_state()
    following = list(original), list(original)

    for remaining in (lambda given: given, lambda given: skip_first_batches(given, 0)):
        resumed = loader()
        resumed.load_state_dict(state)
        torch.set_rng_state(generator)
        assert equal(list(remaining(resumed)), following[0])
        assert resumed.iteration == 2
        assert equal(list(resumed), following[1])
    resumed.load_state_dict(state)
    assert list(skip_first_batches(resumed, 5)) == []


def test_a_second_interruption_counts_from_the_start_of_the_epoch() -> None:
    torch.manual_seed(5)
    original = prepare_data_loader(DataLoader(range(10), shuffle=True))
    expected: list[int] = []
    for number, batch in enumerate(original, 1):
        expected.append(batch.item())
        if number == 3:
            state = original.state_dict()
    for taken in (3, 6):
        resumed = prepare_data_loader(DataLoader(range(10), shuffle=True))
        resumed.load_state_dict(state)
        given = []
        for number, batch in enumerate(skip_first_batches(resumed, taken), 1):
            given.append(batch.item())
            if number == 3:
                state = resumed.state_dict()
        assert given == expected[taken:]
        assert state["batches"] == taken + 3


def test_a_pass_that_was_left_is_taken_up_only_by_skipping_into_it() -> None:
    torch.manual_seed(5)
    original = prepare_data_loader(DataLoader(range(10), shuffle=True))
    order = []
    for batch in original:
        order.append(batch.item())
        if len(order) == 4:
            break
    state, generator = original.state_dict(), torch.get_rng_state()
    anew = torch.cat(list(original)).tolist()

    resumed = prepare_data_loader(DataLoader(range(10), shuffle=True))
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert torch.cat(list(resumed)).tolist() == anew
    resumed.load_state_dict(state)
    rest = torch.cat(list(skip_first_batches(resumed, 4))).tolist()
    assert sorted(order + rest) == list(range(10))


@alike(
    ("workers", "make"),
    [
        (0, lambda: Stream(10)),
        (0, lambda: range(10)),
        (2, lambda: range(10)),
        (2, lambda: Stream(10)),
    ],
    first=2,
    ids=["0-iterable", "0-map", "2-map", "2-iterable"],
)
def test_a_stateful_loader_goes_on_by_itself(make: Any, workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    dataset = make()
    shuffle = not isinstance(dataset, IterableDataset)

    def loader() -> DataLoaderShard:
        bare = DataLoader(dataset, batch_size=2, shuffle=shuffle, num_workers=workers)
        return prepare_data_loader(bare, use_stateful_dataloader=True)

    torch.manual_seed(2)
    original = loader()
    batches = []
    for number, batch in enumerate(original, 1):
        batches.append(batch)
        if number == 2:
            state = original.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert equal(list(resumed), batches[2:])
    assert len(list(resumed)) == len(batches)


def test_a_generator_of_the_user_s_is_resumed() -> None:
    def loader() -> DataLoaderShard:
        generator = torch.Generator().manual_seed(1)
        return prepare_data_loader(DataLoader(range(10), shuffle=True, generator=generator))

    original = loader()
    list(original)
    order = []
    for batch in original:
        order.append(batch.item())
        if len(order) == 4:
            state = original.state_dict()
    following = torch.cat(list(original)).tolist()
    resumed = loader()
    resumed.load_state_dict(state)
    assert torch.cat(list(skip_first_batches(resumed, 4))).tolist() == order[4:]
    assert torch.cat(list(resumed)).tolist() == following


def draw(progress: LoaderProgress, skip: int = 0) -> list[int]:
    with progress.begin(skip):
        return torch.randperm(100).tolist()


def test_an_interrupted_pass_draws_its_order_again() -> None:
    torch.manual_seed(0)
    progress = LoaderProgress([])
    order = draw(progress)
    with progress.running():
        progress.batches = 3
        state = progress.state_dict()
    following = torch.rand(1)

    torch.manual_seed(9)
    again = LoaderProgress([])
    again.load_state_dict(state)
    assert again.resumable
    now = torch.get_rng_state()
    assert draw(again, skip=3) == order
    assert torch.equal(torch.get_rng_state(), now)  # the training's own draws are not disturbed
    assert (again.batches, again.resumable) == (3, False)
    assert not torch.equal(torch.rand(1), following)


def test_a_pass_that_was_given_up_is_taken_up_only_by_skipping() -> None:
    torch.manual_seed(0)
    progress = LoaderProgress([])
    order = draw(progress)
    state = progress.state_dict()
    for skip, same in ((0, False), (1, True)):
        torch.manual_seed(9)
        again = LoaderProgress([])
        again.load_state_dict(state)
        assert (draw(again, skip) == order) is same


def test_a_finished_pass_leaves_only_its_number() -> None:
    generator = torch.Generator().manual_seed(4)
    progress = LoaderProgress([generator])
    draw(progress)
    progress.finish()
    state = progress.state_dict()
    assert (state["epoch"], state["batches"], state["order"]) == (1, 0, None)
    expected = torch.rand(1, generator=generator)
    other = torch.Generator()
    again = LoaderProgress([other])
    again.load_state_dict(state)
    assert torch.equal(torch.rand(1, generator=other), expected)
    assert not again.resumable


def test_a_loader_made_to_read_a_dataset_by_torchdata_has_that_one_s_state() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def theirs() -> Any:
        return torchdata.StatefulDataLoader(range(12), batch_size=2)

    def ours() -> DataLoaderShard:
        return DataLoaderShard(range(12), batch_size=2, use_stateful_dataloader=True)

    def begun(loader: Any) -> dict[str, Any]:
        for index, _ in enumerate(loader):
            if index == 2:
                break
        state: dict[str, Any] = loader.state_dict()
        return state

    state = begun(theirs())
    assert begun(ours()) == state
    resumed = ours()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[6, 7], [8, 9], [10, 11]]
    assert next(batch.tolist() for batch in resumed) == [0, 1]


def test_another_sampler_may_be_set() -> None:
    loader = prepare_data_loader(DataLoader(list(range(4)), batch_size=2))
    assert isinstance(loader.get_sampler(), SequentialSampler)
    loader.set_sampler([3, 1, 2, 0])
    assert [batch.tolist() for batch in loader] == [[3, 1], [2, 0]]
