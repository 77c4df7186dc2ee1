"""The Accelerator and its trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, GeneralTracker
from tests.train.tracking.remembering import Remembering


def test_a_tracker_of_one_s_own_sees_the_whole_run() -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    assert accelerator.get_tracker("remembering") is tracker
    assert accelerator.get_tracker("remembering", unwrap=True) is tracker.seen
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"remembering": {"commit": True}, "other": {"x": 1}})
    accelerator.end_training()
    assert tracker.seen == ["start", {"lr": 0.1}, ({"loss": 1.0}, 3, {"commit": True}), "finish"]


def test_trackers_can_be_read_after_the_training_and_are_finished_once() -> None:
    tracker = Remembering()
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.get_tracker("remembering") is tracker
    assert tracker.seen.count("finish") == 1


def test_without_trackers_logging_does_nothing() -> None:
    accelerator = Accelerator()
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    with pytest.raises(TrainError, match=r"no tracker 'wandb' was started; there are \[\]"):
        accelerator.get_tracker("wandb")


def test_other_processes_get_a_tracker_that_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerator = Accelerator(log_with=Remembering(), project_dir=tmp_path)
    monkeypatch.setattr(accelerator.state._partial, "process_index", 1)
    accelerator.init_trackers("project")
    assert accelerator.trackers == []
    accelerator.get_tracker("remembering").log({"loss": 1.0})


def test_one_tracker_that_cannot_be_finished_keeps_none_of_the_others_from_it() -> None:
    finished: list[str] = []

    class Tracker(GeneralTracker):
        requires_logging_directory = False
        tracker = None

        def __init__(self, name: str) -> None:
            self.name = name
            super().__init__()

        def finish(self) -> None:
            finished.append(self.name)
            if self.name == "first":
                raise OSError("no network")

    accelerator = Accelerator(log_with=[Tracker("first"), Tracker("second")])
    accelerator.init_trackers("project")
    with pytest.raises(OSError, match="no network"):
        accelerator.end_training()
    assert finished == ["first", "second"]
