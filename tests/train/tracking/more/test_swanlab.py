"""SwanLab."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.train import Accelerator
from tests.train.tracking.offline import log_a_run
from tests.train.tracking.recorded import stand_in


def test_calls_of_swanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    swanlab = stand_in(monkeypatch, "swanlab")
    accelerator = Accelerator(cpu=True, log_with="swanlab")
    accelerator.init_trackers("project", {"lr": 0.1}, {"swanlab": {"mode": "local"}})
    accelerator.log({"loss": 0.5, "group": {"a": 1.5}}, step=7)
    accelerator.get_tracker("swanlab").log_images({"sample": ["pixels", "more"]}, step=8)
    accelerator.end_training()
    assert swanlab.to("init") == [((), {"project": "project", "mode": "local"})]
    assert swanlab.to("init().config.update") == [(({"lr": 0.1},), {})]
    assert swanlab.to("init().log")[0] == (({"loss": 0.5, "group/a": 1.5},), {"step": 7})
    assert [args for args, _ in swanlab.to("Image")] == [("pixels",), ("more",)]
    assert swanlab.to("init().finish") == [((), {})]


@pytest.mark.slow
def test_an_offline_run_holds_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    log_a_run("swanlab", tmp_path, {"mode": "offline", "log_dir": str(tmp_path / "runs")})
    (run,) = (tmp_path / "runs").glob("run-*")
    assert "lr" in (run / "files" / "config.yaml").read_text()
    assert list(run.glob("*.swanlab"))
    assert {folder.name for folder in (run / "media").iterdir()} == {"echarts", "image", "text"}
