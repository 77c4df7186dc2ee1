"""`bigmodel generate --batch-file`: a file of answers, in one run or in several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigmodel.cli.main import run
from bigmodel.profile.machine.machine import nominal_machine
from bigmodel.server import batch
from tests.server.tiny import tiny_model, tiny_tokenizer

TEXTS = ["the cat", "in the hat", "a", "the end of it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.plan.planner.measured_machine", nominal_machine)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def generate(model: str, prompts: Path, answers: Path, *options: str) -> int:
    return run(
        ["generate", model, "--batch-file", str(prompts), "--output", str(answers), "--max-tokens", "6", *options]
    )


def texts(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len({line["id"] for line in lines}), "each prompt has one answer"
    return {line["id"]: line["text"] for line in lines}


@pytest.mark.slow
def test_every_prompt_gets_the_answer_that_it_gets_alone(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, prompts, tmp_path / "all.jsonl") == 0
    assert "4 of 4 prompts answered, 24 tokens" in capsys.readouterr().out
    assert generate(model, prompts, tmp_path / "one.jsonl", "--batch-size", "1") == 0
    assert texts(tmp_path / "all.jsonl") == texts(tmp_path / "one.jsonl")


@pytest.mark.slow
def test_a_second_run_goes_on_where_the_first_was_interrupted(
    model: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert generate(model, prompts, whole, "--batch-size", "1") == 0
    each = batch.generate_each

    def interrupted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for count, found in enumerate(each(*args, **kwargs)):
            if count == 2:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(batch, "generate_each", interrupted)
    capsys.readouterr()
    assert generate(model, prompts, parts, "--batch-size", "1") == 130
    assert "2 of 4 prompts answered" in capsys.readouterr().err
    monkeypatch.setattr(batch, "generate_each", each)
    assert generate(model, prompts, parts, "--batch-size", "1") == 0
    assert "2 of 4 prompts answered" in capsys.readouterr().out
    assert texts(parts) == texts(whole)
    assert generate(model, prompts, parts) == 0
    assert "all 4 prompts have their answers" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_that_is_too_long_has_an_error_and_the_others_an_answer(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x" * 5000}) + "\n")
    assert generate(model, prompts, tmp_path / "answers.jsonl", "--context", "64") == 1
    lines = {line["id"]: line for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())}
    assert "5000 tokens" in lines["long"]["error"]
    assert sum("text" in line for line in lines.values()) == 4
    assert "1 prompts have an error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--batch-file", "{prompts}"], "go together"),
        (["--output", "{answers}"], "go together"),
        (["hello", "--steps-in-flight", "2"], "go together"),
        (["hello", "--batch-file", "{prompts}", "--output", "{answers}"], "do not apply to --batch-file"),
        ([], "give PROMPT, or --batch-file and --output"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    model: str, prompts: Path, tmp_path: Path, options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    given = [option.format(prompts=prompts, answers=answers) for option in options]
    assert run(["generate", model, *given]) == 2
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not answers.exists()


@pytest.mark.slow
def test_steps_in_flight_are_the_engines(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    assert generate(model, prompts, answers, "--batch-size", "2", "--steps-in-flight", "2") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "2 steps in flight need parts that are all resident on one of several accelerators" in said
    assert generate(model, prompts, answers, "--batch-size", "2", "--steps-in-flight", "1") == 0


def test_a_wrong_line_ends_the_run_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write("{}\n")
    assert generate("no-such-model", prompts, tmp_path / "answers.jsonl") == 1
    assert "line 5: Value error, give either 'prompt' or 'messages'" in " ".join(capsys.readouterr().err.split())
