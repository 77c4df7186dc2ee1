"""The Accelerator's collectives, trigger and gather_for_metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from bigmodel.train import Accelerator, PartialState, prepare_data_loader
from bigmodel.train.accelerator.gathering import gather_for_metrics
from tests.train.multiprocess import on_ranks


@on_ranks
def test_what_processes_tell_each_other() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    own = torch.tensor([float(rank)])
    assert accelerator.gather(own).tolist() == [0.0, 1.0]
    assert accelerator.gather_for_metrics(["a", rank]) == ["a", 0, "a", 1]
    assert accelerator.reduce(own).item() == 1.0
    assert accelerator.reduce(own, "mean", scale=4.0).item() == 2.0
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1)
    assert padded.tolist() == [[1.0, -1.0], [1.0, 1.0]][rank]


@on_ranks
def test_a_flag_raised_by_one_is_seen_by_all_and_lowered() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_one_process_sees_its_own_flag() -> None:
    accelerator = Accelerator()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def loader(length: int, size: int = 2) -> Any:
    return prepare_data_loader(DataLoader(range(length), batch_size=size))


@on_ranks
def test_nested_tensors_lists_and_objects_lose_their_repeated_samples() -> None:
    found: dict[str, list[Any]] = {"x": [], "twice": [], "text": [], "loss": [], "pair": []}
    for batch in loader(7):
        outputs = {
            "x": batch,
            "twice": batch.repeat_interleave(2),
            "text": [f"sample {i}" for i in batch.tolist()],
            "loss": batch.float().mean(),
            "pair": (batch, [{"id": i} for i in batch.tolist()]),
        }
        gathered = gather_for_metrics(outputs)
        found["x"] += gathered["x"].tolist()
        found["twice"] += gathered["twice"].tolist()
        found["text"] += gathered["text"]
        found["loss"] += gathered["loss"].tolist()
        found["pair"] += gathered["pair"][1]
    assert found["x"] == list(range(7))
    assert found["twice"] == [i for i in range(7) for _ in range(2)]
    assert found["text"] == [f"sample {i}" for i in range(7)]
    assert found["pair"] == [{"id": i} for i in range(7)]
    assert len(found["loss"]) == 4


@on_ranks
def test_the_scalar_of_a_process_with_repeated_samples_alone_is_left_out() -> None:
    found = [gather_for_metrics(batch.float().mean()).tolist() for batch in loader(6)]
    assert found == [[0.5, 2.5], [4.5]]


@on_ranks
def test_what_is_not_of_the_batch_s_length_is_kept_whole() -> None:
    for batch in loader(3):
        histogram = torch.bincount(batch, minlength=5)
        assert gather_for_metrics(histogram).shape == (10,)


@on_ranks
def test_objects_may_be_tensors_of_different_shapes() -> None:
    found: list[Any] = []
    for batch in loader(7):
        found += gather_for_metrics([torch.ones(i + 1) for i in batch.tolist()], use_gather_object=True)
    assert [len(tensor) for tensor in found] == [1, 2, 3, 4, 5, 6, 7]


@on_ranks
def test_a_tensor_among_objects_is_the_list_of_its_rows() -> None:
    found: list[Any] = []
    for batch in loader(7):
        found += gather_for_metrics(batch, use_gather_object=True)
    assert [row.item() for row in found] == list(range(7))


@on_ranks
def test_a_single_object_of_each_process_is_gathered() -> None:
    assert gather_for_metrics("text") == ["text", "text"]
    assert gather_for_metrics(PartialState().process_index) == [0, 1]


@on_ranks
def test_only_the_loader_being_read_counts() -> None:
    inner = loader(3)
    for batch in loader(8):
        for small in inner:
            gathered = gather_for_metrics(small)
        assert gathered.tolist() == [0, 1, 2]
        assert len(gather_for_metrics(batch)) == 4
    assert gather_for_metrics(torch.ones(2)).shape == (4,)


def test_one_process_gets_back_what_it_gives() -> None:
    data = {"x": torch.ones(1)}
    assert gather_for_metrics(data) is data


def test_a_value_repeated_for_a_full_batch_counts_for_each_sample_of_a_shorter_one() -> None:
    losses = []
    for batch in loader(10, size=4):
        mean = batch.float().mean()
        gathered = gather_for_metrics({"loss": mean.repeat(4), "twice": batch.repeat_interleave(2)})
        assert gathered["twice"].tolist() == [i for i in batch.tolist() for _ in range(2)]
        losses += gathered["loss"].tolist()
    assert losses == [1.5] * 4 + [5.5] * 4 + [8.5] * 2


@on_ranks
def test_a_value_repeated_for_a_full_batch_counts_for_each_sample_of_each_process() -> None:
    for even_batches in (False, True):
        prepared: Any = prepare_data_loader(DataLoader(range(14), batch_size=4), even_batches=even_batches)
        losses = [value for batch in prepared for value in gather_for_metrics(batch.float().mean().repeat(4)).tolist()]
        last = (
            12.5 if not even_batches else (12 + 13 + 0 + 1) / 4
        )  # the samples that fill the last batch are in its mean
        assert losses == [1.5] * 4 + [5.5] * 4 + [9.5] * 4 + [last] * 2
