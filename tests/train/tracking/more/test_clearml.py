"""ClearML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.train import Accelerator
from bigmodel.train.tracking import ClearMLTracker
from tests.train.tracking.offline import log_a_run
from tests.train.tracking.recorded import Recorder, stand_in


@pytest.fixture
def clearml(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    for variable in ("CLEARML_PROJECT", "CLEARML_TASK"):
        monkeypatch.delenv(variable, raising=False)
    return stand_in(monkeypatch, "clearml")


def test_names_determine_plot_and_series(clearml: Recorder) -> None:
    tracker = ClearMLTracker("project")
    tracker.start()
    tracker.log({"eval_loss": 0.5, "accuracy": 0.9, "note": "hello"}, step=7)
    tracker.log({"final": 1.0})
    logger = "Task.current_task().get_logger()"
    scalars = [kwargs for _, kwargs in clearml.to(f"{logger}.report_scalar")]
    assert scalars == [
        {"title": "loss", "series": "eval", "value": 0.5, "iteration": 7},
        {"title": "accuracy", "series": "train", "value": 0.9, "iteration": 7},
    ]
    assert clearml.to(f"{logger}.report_single_value") == [((), {"name": "final", "value": 1.0})]
    assert clearml.to(f"{logger}.report_text") == [(("note: hello",), {})]


def test_an_existing_task_is_used_and_not_closed(clearml: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with="clearml")
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.get_tracker("clearml").log_table("test_table", ["x"], [[1]], step=2)
    accelerator.end_training()
    task = "Task.current_task()"
    assert clearml.to(f"{task}.connect_configuration") == [(({"lr": 0.1},), {})]
    ((_, table),) = clearml.to(f"{task}.get_logger().report_table")
    assert table == {"title": "table", "series": "test", "iteration": 2, "table_plot": [["x"], [1]]}
    assert clearml.to("Task.init") == clearml.to(f"{task}.close") == []


@pytest.mark.slow
def test_an_offline_session_holds_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("clearml", reason="clearml is not installed")
    options = {"auto_resource_monitoring": False}
    log_a_run("clearml", tmp_path, options, CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path))
    (session,) = (path for path in (tmp_path / "offline").iterdir() if path.is_dir())
    events = [json.loads(line) for line in (session / "metrics.jsonl").read_text().splitlines()]
    flat = [event for group in events for event in (group if isinstance(group, list) else [group])]
    scalars = {(event["metric"], event["variant"], event["iter"]): event["value"] for event in flat if "value" in event}
    assert scalars[("loss", "train", 7)] == 0.5
    assert scalars[("group/a", "train", 7)] == 1.5
    assert len(list(session.rglob("*.jpeg"))) == 2
