"""DVCLive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator
from bigmodel.train.tracking import DVCLiveTracker
from tests.train.tracking.offline import log_a_run
from tests.train.tracking.recorded import Recorder, stand_in


def test_calls_of_dvclive(monkeypatch: pytest.MonkeyPatch) -> None:
    dvclive = stand_in(monkeypatch, "dvclive")
    accelerator = Accelerator(cpu=True, log_with="dvclive")
    accelerator.init_trackers("project", {"lr": 0.1}, {"dvclive": {"dir": "there"}})
    accelerator.log({"loss": 0.5, "group": {"a": 1.5}, "note": "hello"}, step=7)
    assert accelerator.get_tracker("dvclive", unwrap=True).step == 7
    accelerator.get_tracker("dvclive").log_images({"sample": ["pixels", "more"], "one.jpg": ["pixels"]}, step=8)
    accelerator.end_training()
    assert dvclive.to("Live") == [((), {"dir": "there"})]
    assert dvclive.to("Live().log_params") == [(({"lr": 0.1},), {})]
    metrics = [args for args, _ in dvclive.to("Live().log_metric")]
    assert metrics == [("loss", 0.5), ("group/a", 1.5), ("note", "hello")]
    assert len(dvclive.to("Live().next_step")) == len(dvclive.to("Live().end")) == 1
    images = [args for args, _ in dvclive.to("Live().log_image")]
    assert images == [("sample/0.png", "pixels"), ("sample/1.png", "more"), ("one.jpg", "pixels")]


def test_an_existing_live_object_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    dvclive, own = stand_in(monkeypatch, "dvclive"), Recorder()
    tracker = DVCLiveTracker(live=own)
    tracker.start()
    tracker.log({"loss": 1})
    assert own.to("log_metric") == [(("loss", 1), {})]
    assert dvclive.calls == []


def test_tables_are_refused_by_name() -> None:
    with pytest.raises(TrainError, match="dvclive has no tables, so 'scores' cannot be logged"):
        DVCLiveTracker().log_table("scores", ["x"], [[1]])


@pytest.mark.slow
def test_a_folder_holds_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("dvclive", reason="dvclive is not installed")
    log_a_run("dvclive", tmp_path, {"dir": str(tmp_path / "live"), "save_dvc_exp": False, "dvcyaml": False})
    found = json.loads((tmp_path / "live" / "metrics.json").read_text())
    assert found == {"train_loss": 0.5, "group": {"a": 1.5}, "note": "hello", "step": 7}
    assert (tmp_path / "live" / "params.yaml").read_text() == "lr: 0.1\n"
    assert len(list(tmp_path.rglob("sample/*.png"))) == 2
