"""What a bug report needs."""

from __future__ import annotations

from pathlib import Path

import torch

import bigmodel
from bigmodel.launch.report import environment_report

CONFIGS = Path(__file__).parent / "configs"


def test_versions_machine_and_configuration_are_listed() -> None:
    lines = environment_report(CONFIGS / "deepspeed_stage_3.yaml").splitlines()
    assert all(line.startswith(("- ", "\t- ")) for line in lines)
    assert f"- torch version: {torch.__version__}" in lines
    assert any(line.startswith("- System RAM: ") for line in lines)
    assert "\t- distributed_type: DEEPSPEED" in lines
    assert "\t-   zero_stage: 3" in lines


def test_a_file_with_a_mistake_does_not_keep_the_rest_away(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("num_proceses: 2")
    assert "unknown key 'num_proceses'" in environment_report(path).splitlines()[-1]


def test_the_version_is_known_without_an_installation() -> None:
    assert environment_report().startswith(f"- `bigmodel` version: {bigmodel.__version__}\n")
