"""Comet without a network."""

from __future__ import annotations

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.train.multiprocess import run_script

pytestmark = pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet_ml is not installed")

# Comet patches libraries when it is imported, so the run is a process of its own.
SCRIPT = """
import sys
import comet_ml
from bigmodel.train import Accelerator
accelerator = Accelerator(cpu=True, log_with="comet_ml")
settings = comet_ml.ExperimentConfig(offline_directory=sys.argv[1], disabled=False, log_code=False)
options = {"online": False, "experiment_config": settings}
accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"comet_ml": options})
accelerator.log({"loss": 0.5, "group": {"a": 1.5}, "note": "hello"}, step=7)
accelerator.get_tracker("comet_ml").log_table("table", ["x"], [[1]])
accelerator.end_training()
"""


@pytest.mark.slow
def test_an_offline_experiment_holds_what_was_logged(tmp_path: Path) -> None:
    run_script(["-c", SCRIPT, tmp_path], COMET_LOGGING_CONSOLE="ERROR")
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as content:
        lines = content.read("messages.json").decode().splitlines()
    metrics = [json.loads(line)["payload"].get("metric") for line in lines if '"metric"' in line]
    found = {metric["metricName"]: (metric["metricValue"], metric["step"]) for metric in metrics if metric}
    assert found["loss"] == (0.5, 7)
    assert found["group_a"] == (1.5, 7)
