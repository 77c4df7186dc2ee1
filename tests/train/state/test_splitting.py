"""Which part of a collection belongs to which process."""

from __future__ import annotations

from collections import UserDict, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import TrainError
from bigmodel.train.state.splitting import process_share


@given(length=st.integers(0, 40), processes=st.integers(1, 7))
def test_shares_make_up_the_whole_and_differ_by_one_at_most(length: int, processes: int) -> None:
    shares = [process_share(list(range(length)), processes, rank) for rank in range(processes)]
    assert [item for share in shares for item in share] == list(range(length))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(length=st.integers(1, 40), processes=st.integers(1, 7))
def test_padding_repeats_the_last_element(length: int, processes: int) -> None:
    items = tuple(range(length))
    shares = [process_share(items, processes, rank, apply_padding=True) for rank in range(processes)]
    assert len({len(share) for share in shares}) == 1
    flat = [item for share in shares for item in share]
    assert sorted(set(flat)) == list(items)
    assert all(item == length - 1 for item in flat if flat.count(item) > 1)


def test_tensors_and_dicts_are_split_alike() -> None:
    data = {"x": torch.arange(5), "names": list("abcde")}
    first, second = (process_share(data, 2, rank, apply_padding=True) for rank in range(2))
    assert (first["x"].tolist(), first["names"]) == ([0, 1, 2], ["a", "b", "c"])
    assert (second["x"].tolist(), second["names"]) == ([3, 4, 4], ["d", "e", "e"])


def test_a_dataset_with_select_is_split_by_its_own_method() -> None:
    class Selectable:
        def __len__(self) -> int:
            return 3

        def select(self, indices: list[int]) -> list[int]:
            return indices

    assert process_share(Selectable(), 2, 1, apply_padding=True) == [2, 2]


def test_values_of_different_length_are_refused() -> None:
    with pytest.raises(TrainError, match=r"must have one length.*'a': 1, 'b': 2"):
        process_share({"a": [1], "b": [1, 2]}, 2, 0)


def test_nothing_is_split_into_nothing() -> None:
    assert process_share([], 2, 0, apply_padding=True) == []


def test_padding_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(TrainError, match="does not know how to repeat"):
        process_share("abc", 2, 1, apply_padding=True)


def test_mappings_of_other_types_are_split_like_dicts() -> None:
    """A tokenizer's BatchEncoding is one of these; its length is the number of its keys."""
    tokens = UserDict({"ids": torch.arange(5), "names": list("abcde")})
    share = process_share(tokens, 2, 1)
    assert (type(share), share["ids"].tolist(), share["names"]) == (UserDict, [3, 4], ["d", "e"])
    grouped = defaultdict(list, a=[1, 2, 3])
    assert process_share(grouped, 2, 0) == {"a": [1, 2]}
