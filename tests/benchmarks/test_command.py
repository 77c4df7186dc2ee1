"""The command line of all questions."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bigmodel.benchmarks import command
from bigmodel.benchmarks.harness import BenchmarkError, Column, Limit, Report, Table


@pytest.fixture
def question(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A question that takes no time."""
    module = ModuleType("bigmodel.benchmarks.echo")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("word", nargs="?", default="nothing")
        parser.set_defaults(rounds=3)

    def run(options: argparse.Namespace) -> Report:
        if options.word == "fail":
            raise BenchmarkError("it could not\nbe measured")
        table = Table("Echo", [Column("word"), Column("rounds", "count")], [[options.word, options.rounds]])
        return Report(
            "echo", options.device, tables=[table], limits=[Limit("rounds", options.rounds, "<=", 3, "count")]
        )

    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bigmodel.benchmarks.echo", module)
    monkeypatch.setattr(command, "questions", lambda: {"echo": "What was said?"})
    return module


pytestmark = pytest.mark.usefixtures("question")


def test_without_a_name_the_questions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "echo  What was said?" in capsys.readouterr().out


def test_a_question_is_answered_and_its_result_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["echo", "hello", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Echo\nword   rounds\nhello       3\n")
    (path,) = tmp_path.iterdir()
    assert str(path) in err
    assert json.loads(path.read_text())["tables"][0]["rows"] == [{"word": "hello", "rounds": 3}]


def test_a_result_is_kept_though_nobody_reads_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(*arguments: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "show", gone)
    assert command.main(["echo", "hello", "--results", str(tmp_path)]) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_for_checkpoints_is_there_when_it_is_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert command.main(["echo", "--quick", "--workdir", str(folder)]) == 0
    assert folder.is_dir()


def test_threads_are_those_asked_for() -> None:
    for threads in (1, 2):
        assert command.main(["echo", "--quick", "--threads", str(threads)]) == 0
        assert torch.get_num_threads() == threads


def test_figures_are_not_labelled_with_a_device_they_were_not_measured_on(
    question: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["echo", "--quick", "--device", "cuda"]) == 2
    assert "--device cuda, only cpu" in capsys.readouterr().err
    question.ONLY = "it is said on the host"  # type: ignore[attr-defined]
    assert command.main(["echo", "--quick", "--device", "cuda"]) == 2
    assert "only cpu: it is said on the host" in capsys.readouterr().err
    question.DEVICES = ("cpu", "cuda")  # type: ignore[attr-defined]
    assert command.main(["echo", "--quick", "--device", "cuda:0"]) == 0


def test_a_quick_answer_is_kept_only_where_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["echo", "--quick"]) == 0
    assert "results kept" not in capsys.readouterr().err


def test_json_and_csv_are_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["echo", "hello", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "echo"
    assert command.main(["echo", "hello", "--quick", "--csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows == [["table", "word", "rounds"], ["Echo", "hello", "3"]]


def test_a_missed_limit_fails_only_if_it_is_asked_for() -> None:
    assert command.main(["echo", "--quick", "--rounds", "4"]) == 0
    assert command.main(["echo", "--quick", "--rounds", "4", "--check"]) == 1
    assert command.main(["echo", "--quick", "--rounds", "3", "--check"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["echo", "--nothing"],
        ["echo", "--rounds", "0"],
        ["echo", "--rounds", "x"],
        ["echo", "--json", "--csv"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("python -m benchmarks: ")


def test_a_failure_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["echo", "fail"]) == 1
    assert capsys.readouterr().err == "python -m benchmarks: it could not be measured\n"


def test_debug_shows_where_it_failed() -> None:
    with pytest.raises(BenchmarkError):
        command.main(["echo", "fail", "--debug"])


def test_help_names_the_common_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["echo", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--rounds", "--device", "--quick", "--json", "--csv", "--seed"))


def test_help_tells_how_it_is_measured_and_the_defaults_that_say_something(
    question: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    question.__doc__ = "What was said?\n\nIt is said once."
    with pytest.raises(SystemExit):
        command.main(["echo", "--help"])
    out = capsys.readouterr().out
    assert "What was said?\n\nIt is said once." in out
    assert "values for each variant (default: 3)" in out
    assert "of the order within rounds (default: 0)" in out
    assert "folder for the JSON file (default: benchmarks/results of a checkout" in " ".join(out.split())
    assert "default: None" not in out
    assert "default: False" not in out


def test_checkpoints_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert command.default_workdir() == tmp_path / "bigmodel" / "benchmarks"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert command.default_workdir() == Path.home() / ".cache" / "bigmodel" / "benchmarks"
