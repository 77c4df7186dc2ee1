"""Choosing trackers by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator
from bigmodel.train.tracking import filter_trackers, register_tracker_class, registry
from bigmodel.train.tracking.registry import available_trackers
from bigmodel.train.types import LoggerType

from .remembering import Remembering


def only_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(registry, "_is_installed", lambda module: module in names)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only_installed(monkeypatch)
    with pytest.raises(TrainError, match="'wandb' needs a package that is not installed: `pip install wandb`"):
        Accelerator(cpu=True, log_with="wandb")


def test_the_error_for_a_mistyped_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        filter_trackers(["tensorbord"], tmp_path)


@pytest.mark.parametrize("name", [str(name) for name in LoggerType if name != LoggerType.ALL])
def test_every_name_of_the_list_is_known(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only_installed(monkeypatch, name)
    assert filter_trackers([name.upper()], tmp_path) == [name]


def test_a_tracker_that_writes_files_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    only_installed(monkeypatch, "tensorboard")
    with pytest.raises(TrainError, match="'tensorboard' writes files: give Accelerator a project_dir"):
        filter_trackers(["tensorboard"], None)


def test_all_means_every_installed_one_that_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only_installed(monkeypatch, "tensorboard", "wandb")
    assert filter_trackers(["all"], tmp_path) == ["tensorboard", "wandb"]
    assert filter_trackers([LoggerType.ALL], None) == ["wandb"]
    assert available_trackers() == ["tensorboard", "wandb"]


def test_objects_and_names_may_be_mixed_and_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    only_installed(monkeypatch, "wandb")
    own = Remembering()
    assert filter_trackers(["wandb", own, LoggerType.WANDB, own]) == ["wandb", own]


def test_a_registered_class_has_a_name_like_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Remembering):
        name = "named"

        def __init__(self, run_name: str, colour: str = "red") -> None:
            super().__init__()
            self.seen.append((run_name, colour))

    monkeypatch.setattr(registry, "_TRACKERS", dict(registry._TRACKERS))
    register_tracker_class(Named)
    accelerator = Accelerator(cpu=True, log_with="named")
    accelerator.init_trackers("project", init_kwargs={"named": {"colour": "blue"}})
    assert accelerator.get_tracker("named", unwrap=True) == [("project", "blue"), "start"]
