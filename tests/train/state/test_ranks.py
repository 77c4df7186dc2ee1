"""What only some processes do, or do first."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.operations.collectives import gather_object
from bigmodel.train.state.ranks import RankOperations
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
