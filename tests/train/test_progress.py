"""The progress bar that shows once."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from bigmodel.errors import TrainError
from bigmodel.train.progress import tqdm
from bigmodel.train.state.accelerator_state import AcceleratorState
from bigmodel.train.state.partial import PartialState


@pytest.fixture
def state() -> Iterator[PartialState]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield PartialState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def shown(**options: object) -> str:
    stream = io.StringIO()
    assert list(tqdm(range(3), file=stream, **options)) == [0, 1, 2]
    return stream.getvalue()


def test_it_shows_on_the_first_process_of_a_machine(state, monkeypatch) -> None:
    assert "3/3" in shown()
    monkeypatch.setitem(state.__dict__, "local_process_index", 1)
    assert shown() == ""
    assert "3/3" in shown(main_process_only=False)


def test_disable_is_respected(state) -> None:
    assert shown(disable=True) == ""


def test_the_old_order_of_arguments_is_refused(state) -> None:
    with pytest.raises(TrainError, match="pass main_process_only by its name"):
        tqdm(True, range(3))
