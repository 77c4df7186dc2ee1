"""The command `llm`, with models that its file of extra models names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients.asked import ANSWER, SAID
from tests.server.live import MODEL

pytest.importorskip("llm", reason="llm is not installed: make clients installs it")

from click.testing import CliRunner
from llm.cli import cli

FUNCTIONS = """
def get_weather(city: str, days: int) -> str:
    "The weather."
    return "rain"
def get_time() -> str:
    "The time."
    return "noon"
"""
Ask = Callable[..., str]


@pytest.fixture
def ask(url: str, hermes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run `llm` with these arguments; gives what it prints."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    common: dict[str, Any] = {"model_name": MODEL, "api_base": f"{url}/v1"}
    models = [
        {"model_id": "chat", **common, "supports_schema": True},
        {"model_id": "whole", **common, "can_stream": False, "reasoning": True},
        {"model_id": "text", **common, "completion": True},
        {"model_id": "caller", **common, "api_base": f"{hermes}/v1", "supports_tools": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # YAML has JSON in it

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, [*arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return str(result.stdout).removesuffix("\n")

    return run


@pytest.mark.slow
def test_a_chat_its_stream_and_its_continuation(ask: Ask) -> None:
    greedy = ["-o", "temperature", "0", "-o", "max_tokens", "6"]
    assert ask("-m", "chat", "hi", *greedy) == ask("-m", "whole", "hi", *greedy) != ""
    assert ask("-c", "and?", *greedy)


@pytest.mark.slow
def test_every_option_is_taken(ask: Ask) -> None:
    options = {
        "max_tokens": "6",
        "temperature": "0.5",
        "top_p": "0.9",
        "seed": "3",
        "stop": "x",
        "logit_bias": '{"5": 3}',
    }
    options |= {"frequency_penalty": "0.1", "presence_penalty": "0.1"}
    flags = [part for name, value in options.items() for part in ("-o", name, value)]
    assert ask("-m", "chat", "hi", "-s", "Be brief.", *flags) == ask("-m", "chat", "hi", "-s", "Be brief.", *flags)


@pytest.mark.slow
def test_a_text_with_log_probabilities(ask: Ask) -> None:
    assert ask("-m", "text", "the cat", "-o", "max_tokens", "6", "-o", "logprobs", "2", "-o", "temperature", "0")


@pytest.mark.slow
def test_an_answer_fits_its_schema(ask: Ask) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    answer = json.loads(ask("-m", "chat", "hi", "--schema", "days int", "-o", "max_tokens", "200", "-o", "seed", "1"))
    assert isinstance(answer["days"], int)
    assert isinstance(json.loads(ask("-m", "chat", "hi", "-o", "json_object", "1", "-o", "seed", "1")), dict)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_functions_are_used(ask: Ask, more: list[str]) -> None:
    said = ask("-m", "caller", "hi", "--functions", FUNCTIONS, "-o", "temperature", "0", *more)
    assert said.split() == [*SAID.split(), *ANSWER.split()]
