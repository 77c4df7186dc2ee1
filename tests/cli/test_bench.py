"""`bigmodel bench` is `python -m benchmarks`."""

from __future__ import annotations

import pytest

import bigmodel.benchmarks.command
from bigmodel.benchmarks.harness import UsageError
from bigmodel.cli.main import run


def test_everything_behind_bench_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def answer(arguments: list[str], program: str) -> int:
        seen.extend([arguments, program])
        return 0

    monkeypatch.setattr(bigmodel.benchmarks.command, "run", answer)
    assert run(["bench", "memory", "model", "--rounds", "3", "--help", "--csv"]) == 0
    assert seen == [["memory", "model", "--rounds", "3", "--help", "--csv"], "bigmodel bench"]


def test_without_a_name_the_questions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: bigmodel bench NAME [options]")
    assert "memory" in out


def test_a_missed_limit_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigmodel.benchmarks.command, "run", lambda arguments, program: 1)
    assert run(["bench", "memory", "--check"]) == 1


def test_wrong_usage_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: list[str], program: str) -> int:
        raise UsageError("'nothing' is no question")

    monkeypatch.setattr(bigmodel.benchmarks.command, "run", refuse)
    assert run(["bench", "nothing"]) == 2
    assert capsys.readouterr().err == "bigmodel bench: 'nothing' is no question\n"
