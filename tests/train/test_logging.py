"""Rank-aware logging and the progress bar that shows once."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from bigmodel.errors import TrainError
from bigmodel.train.accelerator_state import AcceleratorState
from bigmodel.train.logging import get_logger, tqdm
from bigmodel.train.state.partial import PartialState


@pytest.fixture
def state() -> Iterator[PartialState]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield PartialState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def pretend_rank(state: PartialState, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int = 2) -> list[str]:
    """Make this process rank `rank`; answer the list of what it would have waited for."""
    waited: list[str] = []
    monkeypatch.setitem(state.__dict__, "process_index", rank)
    monkeypatch.setitem(state.__dict__, "num_processes", ranks)
    monkeypatch.setattr(PartialState, "wait_for_everyone", lambda self: waited.append("wait"))
    return waited


def test_the_main_process_logs_by_default(state, caplog, monkeypatch) -> None:
    logger = get_logger("ranks", log_level="INFO")
    logger.info("from %s", "main")
    pretend_rank(state, monkeypatch, rank=1)
    logger.info("from another")
    assert caplog.messages == ["[RANK 0] from main"]
    assert caplog.records[0].pathname == __file__


def test_every_process_logs_when_asked(state, caplog, monkeypatch) -> None:
    pretend_rank(state, monkeypatch, rank=1)
    get_logger("ranks").warning("everyone", main_process_only=False)
    assert caplog.messages == ["[RANK 1] everyone"]


@pytest.mark.parametrize("options", [{}, {"main_process_only": True}, {"main_process_only": False}])
def test_in_order_means_every_process_one_after_the_other(state, caplog, monkeypatch, options) -> None:
    waited = pretend_rank(state, monkeypatch, rank=1, ranks=3)
    get_logger("ranks").warning("mine", in_order=True, **options)
    assert caplog.messages == ["[RANK 1] mine"]
    assert waited == ["wait"] * 3


def test_a_level_that_is_off_makes_nobody_wait(state, caplog, monkeypatch) -> None:
    waited = pretend_rank(state, monkeypatch, rank=0)
    get_logger("ranks", log_level="ERROR").warning("x", main_process_only=False, in_order=True)
    assert (caplog.messages, waited) == ([], [])


def test_a_warning_is_given_once_for_each_message(state, caplog) -> None:
    logger = get_logger("once", log_level=logging.WARNING)
    for number in (1, 1, 2):
        logger.warning_once("number %d", number)
    assert caplog.messages == ["[RANK 0] number 1", "[RANK 0] number 2"]
    assert caplog.records[0].pathname.endswith(("test_logging.py", "logging.py"))


def test_the_level_may_come_from_the_environment(state, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("by environment").isEnabledFor(logging.DEBUG)


def test_without_a_state_the_error_says_what_to_make() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(TrainError, match=r"make an Accelerator\(\) or a PartialState\(\)"):
        get_logger("early").warning("x")


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
    with pytest.raises(TrainError, match="pass main_process_only by name"):
        tqdm(True, range(3))
