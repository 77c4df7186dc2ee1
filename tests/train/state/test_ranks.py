"""Code that only some processes run, or run first, and splitting a collection among processes."""

from __future__ import annotations

from collections import UserDict, defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.collectives import gather_object
from bigmodel.train.state.ranks import RankOperations, process_share
from tests.train.multiprocess import on_ranks


class Rank(RankOperations):
    def __init__(self, index: int, count: int, local: int) -> None:
        self.process_index, self.num_processes, self.local_process_index = index, count, local


def test_predicates_follow_from_the_numbers() -> None:
    ranks = [Rank(0, 4, 0), Rank(2, 4, 0), Rank(3, 4, 1)]
    assert [rank.is_main_process for rank in ranks] == [True, False, False]
    assert [rank.is_local_main_process for rank in ranks] == [True, True, False]
    assert [rank.is_last_process for rank in ranks] == [False, False, True]


def test_decorated_functions_run_where_they_should() -> None:
    rank = Rank(3, 4, 1)

    @rank.on_main_process
    def main() -> str:
        return "main"

    @rank.on_local_process(local_process_index=1)
    def local(text: str) -> str:
        """Doc."""
        return text

    assert main() is None
    assert local("here") == "here"
    assert local.__doc__ == "Doc."
    assert rank.on_last_process(lambda: 1)() == 1
    assert rank.on_process(lambda: 1, process_index=3)() == 1
    assert rank.on_process(process_index=0)(lambda: 1)() is None
    assert rank.on_local_main_process(lambda: 1)() is None


def test_a_decorator_without_its_number_says_so() -> None:
    with pytest.raises(TrainError, match="needs process_index"):
        Rank(0, 1, 0).on_process(lambda: 1)
    with pytest.raises(TrainError, match="needs local_process_index"):
        Rank(0, 1, 0).on_local_process(lambda: 1)


def test_printing_happens_once_on_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (Rank(0, 4, 0), Rank(1, 4, 1), Rank(2, 4, 0)):
        rank.print("from", rank.process_index)
    assert capsys.readouterr().out == "from 0\nfrom 2\n"


@pytest.mark.slow
@on_ranks
def test_the_main_process_goes_first(folder: Path) -> None:
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            (folder / "made").touch()
        assert (folder / "made").exists()


@on_ranks
def test_the_others_are_let_through_when_the_first_fails() -> None:
    state = PartialState()
    if state.is_main_process:
        with pytest.raises(OSError, match="failed"), state.main_process_first():
            raise OSError("failed")
    else:
        with state.main_process_first():
            pass


@on_ranks
def test_inputs_are_split_and_come_together_again() -> None:
    state = PartialState()
    with state.split_between_processes(list(range(5))) as own:
        assert own == [[0, 1, 2], [3, 4]][state.process_index]
        assert gather_object(own) == list(range(5))
    with state.split_between_processes(list(range(5)), apply_padding=True) as own:
        assert len(own) == 3


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
