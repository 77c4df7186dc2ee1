"""Per-batch records with the count of real rows, and prefetching to the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from bigmodel.devices import virtual
from bigmodel.train import prepare_data_loader
from bigmodel.train.data.steps import LoaderStep, move_ahead, move_each, real_rows


@pytest.mark.parametrize(
    ("uneven", "rows", "real", "length", "expected"),
    [
        (False, 0, 0, 4, 4),
        (True, 4, 3, 4, 3),
        (True, 4, 3, 8, 6),  # two outputs for each sample
        (True, 4, 3, 7, 7),  # nothing to do with the samples
        (True, 4, 0, 4, 0),
    ],
)
def test_repeated_samples_do_not_count(uneven: bool, rows: int, real: int, length: int, expected: int) -> None:
    assert real_rows(LoaderStep(torch.zeros(4), False, uneven, rows, real), length) == expected


DEVICE = "virtual:0"


def counted(read: list[int], length: int = 4) -> Iterator[LoaderStep]:
    for number in range(length):
        read.append(number)
        yield LoaderStep({"x": torch.full((2,), number)}, last=number == length - 1)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_the_next_batch_is_read_while_one_is_computed_with() -> None:
    read: list[int] = []
    for number, step in enumerate(move_ahead(counted(read), torch.device(DEVICE))):
        assert read == list(range(min(number + 2, 4)))
        assert step.batch["x"].device == torch.device(DEVICE)
        assert step.batch["x"].cpu().tolist() == [number, number]
        assert step.last == (number == 3)


@pytest.mark.usefixtures("accelerators")
def test_without_reading_ahead_each_batch_is_moved_when_it_is_asked_for() -> None:
    read: list[int] = []
    for number, step in enumerate(move_each(counted(read), torch.device(DEVICE), non_blocking=False)):
        assert read == list(range(number + 1))
        assert step.batch["x"].device == torch.device(DEVICE)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_prepared_loader_gives_batches_on_its_device(workers: int) -> None:
    loader = DataLoader(range(5), batch_size=2, num_workers=workers)
    prepared = prepare_data_loader(loader, torch.device(DEVICE), put_on_device=True)
    batches = [(batch.device, batch.cpu().tolist(), prepared.end_of_dataloader) for batch in prepared]
    assert batches == [
        (torch.device(DEVICE), [0, 1], False),
        (torch.device(DEVICE), [2, 3], False),
        (torch.device(DEVICE), [4], True),
    ]


@pytest.mark.usefixtures("accelerators")
def test_an_error_while_reading_ahead_comes_out() -> None:
    def failing() -> Iterator[LoaderStep]:
        yield LoaderStep(torch.zeros(1), False)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(move_ahead(failing(), torch.device(DEVICE)))


@pytest.mark.usefixtures("accelerators")
def test_memory_of_a_batch_is_not_used_again_before_computation_with_it() -> None:
    total = torch.zeros(2, device=DEVICE)
    steps = move_ahead(counted([]), torch.device(DEVICE))
    for step in steps:
        total += step.batch["x"]
        del step
    assert virtual.races() == []
    assert total.tolist() == [6.0, 6.0]


@pytest.mark.usefixtures("accelerators")
def test_who_stops_early_waits_for_the_batch_under_way() -> None:
    steps = move_ahead(counted([]), torch.device(DEVICE))
    next(steps)
    before = virtual.host_waits()
    steps.close()
    assert virtual.host_waits().since(before).synchronizations == 1
