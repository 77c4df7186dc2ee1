"""MLflow in a folder."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bigmodel.train import Accelerator

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow (or mlflow-skinny) is not installed")


@pytest.mark.slow
def test_a_run_holds_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    many = {f"p{number}": number for number in range(150)}
    options = {"logging_dir": f"file:{tmp_path}/runs", "run_name": "first"}
    accelerator.init_trackers("project", config={"long": "x" * 9000, **many}, init_kwargs={"mlflow": options})
    accelerator.log({"loss": {"train": 0.5}, "note": "hello"}, step=1)
    tracker = accelerator.get_tracker("mlflow")
    tracker.log_table("table", ["x"], [[1]], step=1)
    tracker.log_images({"sample": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=1)
    number = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    accelerator.end_training()
    import mlflow

    run = mlflow.get_run(number)
    assert run.data.metrics == {"loss/train": 0.5}
    assert len(run.data.params) == 151
    assert run.data.params["p149"] == "149"
    assert run.data.tags["note"] == "hello"
    (table,) = tmp_path.rglob("table_1.json")
    assert json.loads(table.read_text()) == {"columns": ["x"], "data": [[1]]}
    assert list(tmp_path.rglob("sample_1_0.png"))
