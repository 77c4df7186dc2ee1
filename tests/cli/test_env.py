"""`bigmodel env`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.cli.main import run


def test_it_prints_versions_and_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 3")
    assert run(["env", "--config_file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "- `bigmodel` version:" in shown
    assert "num_processes: 3" in shown
