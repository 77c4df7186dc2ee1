"""Making shapes equal."""

from __future__ import annotations

import torch

from bigmodel.train import PartialState
from bigmodel.train.operations.padding import pad_across_processes, pad_input_tensors
from tests.train.multiprocess import on_ranks


@on_ranks
def test_the_shorter_tensor_is_padded_to_the_longer() -> None:
    rank = PartialState().process_index
    own = torch.full((1, rank + 1), 5)
    assert pad_across_processes(own, dim=1, pad_index=-1).tolist() == [[5, -1], [5, 5]][rank : rank + 1]
    assert pad_across_processes(own, dim=-1, pad_first=True).tolist() == [[0, 5], [5, 5]][rank : rank + 1]
    assert pad_across_processes({"x": own}, dim=0)["x"] is own


@on_ranks
def test_tensors_without_the_dimension_are_left_alone() -> None:
    scalar = torch.tensor(1.0)
    assert pad_across_processes(scalar) is scalar


def test_one_process_pads_nothing() -> None:
    x = torch.ones(2)
    assert pad_across_processes(x) is x


def test_the_last_row_is_repeated_until_the_length_divides() -> None:
    padded = pad_input_tensors({"x": torch.arange(5), "other": torch.ones(2)}, batch_size=5, num_processes=4)
    assert padded["x"].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert padded["other"].shape == (2,)
    whole = torch.ones(4)
    assert pad_input_tensors(whole, 4, 2) is whole
