"""Aim."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.train import Accelerator
from tests.train.tracking.offline import log_a_run
from tests.train.tracking.recorded import stand_in


def test_calls_of_aim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    aim = stand_in(monkeypatch, "aim")
    accelerator = Accelerator(cpu=True, log_with="aim", project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 0.1}, {"aim": {"experiment": "first"}})
    assert accelerator.get_tracker("aim", unwrap=True).name == "project"
    accelerator.log({"loss": 0.5, "group": {"a": 1.5}}, step=7, log_kwargs={"aim": {"epoch": 2}})
    accelerator.get_tracker("aim").log_images({"sample": ("pixels", "a caption")}, step=8, track={"epoch": 3})
    accelerator.get_tracker("aim").log_table("table", ["x", "y"], [[1, "b|c"]])
    accelerator.end_training()
    assert aim.to("Run") == [((), {"repo": str(tmp_path), "experiment": "first"})]
    assert aim.to("Run()[]") == [(("hparams", {"lr": 0.1}), {})]
    numbers = [(*args, *kwargs.values()) for args, kwargs in aim.to("Run().track")[:2]]
    assert numbers == [(0.5, "loss", 7, 2), (1.5, "group/a", 7, 2)]
    assert aim.to("Image") == [(("pixels",), {"caption": "a caption"})]
    assert aim.to("Run().track")[2][1] == {"name": "sample", "step": 8, "epoch": 3}
    assert aim.to("Text") == [(("| x | y |\n| --- | --- |\n| 1 | b\\|c |",), {})]
    assert aim.to("Run().close") == [((), {})]


@pytest.mark.slow
def test_a_local_repository_holds_the_run(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim", reason="aim is not installed")
    log_a_run("aim", tmp_path, {"system_tracking_interval": None, "capture_terminal_logs": False})
    assert len(aim.Repo.from_path(str(tmp_path)).list_all_runs()) == 1
