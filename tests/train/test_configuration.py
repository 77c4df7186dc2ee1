"""Configurations that cannot be meant are refused; the launcher's variables fill what is not said."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin


def test_logs_lie_in_the_project_unless_they_have_a_place(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path)
    assert config.project_dir == config.logging_dir == str(tmp_path)
    config = ProjectConfiguration(logging_dir="logs")
    config.set_directories("project")
    assert (config.project_dir, config.logging_dir) == ("project", "logs")


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TrainError, match="total_limit is 0"):
        ProjectConfiguration(total_limit=0)
    with pytest.raises(TrainError, match="over 0 steps"):
        GradientAccumulationPlugin(num_steps=0)


def test_compilation_is_said_by_the_launcher_or_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not TorchDynamoPlugin().enabled
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
    plugin = TorchDynamoPlugin()
    assert plugin.enabled
    assert plugin.compile_kwargs() == {
        "backend": "inductor",
        "mode": "reduce-overhead",
        "fullgraph": False,
        "dynamic": True,
        "disable": False,
    }
    assert TorchDynamoPlugin(backend="eager", options={"a": 1}).compile_kwargs()["options"] == {"a": 1}
    assert not TorchDynamoPlugin(disable=True).enabled
