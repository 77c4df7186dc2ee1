"""Trackio in a local database."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.train.multiprocess import run_script

pytestmark = pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")

# Trackio chooses its folder when it is imported, so the run is a process of its own.
SCRIPT = """
import numpy as np
from bigmodel.train import Accelerator
accelerator = Accelerator(cpu=True, log_with="trackio")
options = {"name": "first", "auto_log_cpu": False, "auto_log_gpu": False}
accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"trackio": options})
accelerator.log({"loss": 0.5}, step=1)
tracker = accelerator.get_tracker("trackio")
tracker.log_images({"sample": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
tracker.log_table("table", ["x"], [[1]], step=3)
accelerator.end_training()
import trackio
(run,) = trackio.Api().runs("project")
logs = trackio.SQLiteStorage.get_logs("project", "first")
print(run.name, run.config["lr"], [entry["loss"] for entry in logs if "loss" in entry])
"""


@pytest.mark.slow
def test_a_run_holds_what_was_logged(tmp_path: Path) -> None:
    written = run_script(["-c", SCRIPT], TRACKIO_DIR=str(tmp_path))
    assert "first 0.1 [0.5]" in written.splitlines()
    assert list(tmp_path.rglob("*.png"))
