"""Weights & Biases without a network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bigmodel.train import Accelerator

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


@pytest.mark.long
@pytest.mark.slow
def test_an_offline_run_holds_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    options = {"mode": "offline", "dir": str(tmp_path), "name": "first"}
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"wandb": options})
    accelerator.log({"loss": 0.5}, step=1)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"sample": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
    tracker.log_table("table", ["x"], [[1]], step=3)
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert run.config["lr"] == 0.1
    assert run.summary["loss"] == 0.5
    accelerator.end_training()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert list(folder.rglob("*.png"))
    assert list(folder.rglob("*.table.json"))
