"""`bigmodel launch` from a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.cli.main import run


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "bigmodel launch [flags] script.py [script flags]" in shown
    assert "--num_processes" in shown
    assert "--zero_stage" in shown


def test_a_mistake_is_one_line_and_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--num_proceses", "2", "train.py"]) == 1
    assert capsys.readouterr().err == "bigmodel: unknown flag '--num_proceses'. Did you mean '--num_processes'?\n"


def test_flags_of_the_script_reach_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("bigmodel.launch.run", lambda launch: seen.append(launch) or 5)
    assert run(["launch", "--num-processes", "2", "train.py", "--help", "--debug", "-m", "--", "--x=1"]) == 5
    assert seen[0].script_arguments == ("--help", "--debug", "-m", "--", "--x=1")
    assert seen[0].config.num_processes == 2
    assert seen[0].config.debug is None
