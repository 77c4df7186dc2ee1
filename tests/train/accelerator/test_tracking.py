"""The Accelerator and its trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator
from bigmodel.train.tracking import GeneralTracker


class Notes(GeneralTracker):
    """Keeps what it is told."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    def start(self) -> None:
        self.seen.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((values, step, kwargs))

    def finish(self) -> None:
        self.seen.append("finish")


def test_a_tracker_of_one_s_own_sees_the_whole_run() -> None:
    notes = Notes()
    accelerator = Accelerator(log_with=notes)
    accelerator.init_trackers("project", config={"lr": 0.1})
    assert accelerator.get_tracker("notes") is notes
    assert accelerator.get_tracker("notes", unwrap=True) is notes.seen
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"notes": {"commit": True}, "other": {"x": 1}})
    accelerator.end_training()
    assert notes.seen == ["start", {"lr": 0.1}, ({"loss": 1.0}, 3, {"commit": True}), "finish"]


def test_without_trackers_logging_does_nothing() -> None:
    accelerator = Accelerator()
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    with pytest.raises(TrainError, match=r"no tracker 'wandb' was started; there are \[\]"):
        accelerator.get_tracker("wandb")


def test_other_processes_get_a_tracker_that_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerator = Accelerator(log_with=Notes(), project_dir=tmp_path)
    monkeypatch.setattr(accelerator.state._partial, "process_index", 1)
    accelerator.init_trackers("project")
    assert accelerator.trackers == []
    accelerator.get_tracker("notes").log({"loss": 1.0})
