"""`bigmodel config`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bigmodel.cli.main import run
from bigmodel.launch import load_config


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def test_answers_become_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\ncpu\nddp\n2\nbf16\nn\n"))
    path = tmp_path / "mine.yaml"
    assert run(["config", "--config_file", str(path)]) == 0
    found = load_config(path)
    assert (found.distributed_type, found.num_processes, found.mixed_precision) == ("MULTI_CPU", 2, "bf16")


def test_default_asks_nothing_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config" / "bigmodel" / "default_config.yaml"
    assert run(["config", "default", "--mixed_precision", "fp16"]) == 0
    assert load_config(path).mixed_precision == "fp16"
    assert run(["config", "default"]) == 0
    assert "already exists and was not changed" in capsys.readouterr().out
    assert load_config(path).mixed_precision == "fp16"


def test_update_writes_an_old_file_in_todays_form(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("fp16: true\ntpu_env: []\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    assert run(["config", "update", "--config-file", str(path)]) == 0
    assert "tpu_env" not in path.read_text()
    assert load_config(path).mixed_precision == "fp16"


def test_an_early_end_writes_nothing(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n"))
    path = tmp_path / "mine.yaml"
    assert run(["config", "--config_file", str(path)]) == 1
    assert "input ended" in capsys.readouterr().err
    assert not path.exists()
