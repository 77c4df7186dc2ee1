"""`bigmodel generate`: text on standard output, then one line of numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bigmodel.server.loading
from bigmodel.cli.generate import generate, peak_text
from bigmodel.errors import ServeError
from bigmodel.server import Loaded
from bigmodel.server.engine.kv.buffers import GROWTH
from tests.server.tiny import tiny_model, tiny_tokenizer

command = typer.Typer()
command.command()(generate)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tiny model in the place of whatever is asked for; gives the arguments of the load."""
    seen: dict[str, Any] = {}

    def load(model: str, **options: Any) -> Loaded:
        seen.update(options, model=model)
        return Loaded(tiny_model(), tiny_tokenizer())

    monkeypatch.setattr(bigmodel.server.loading, "load", load)
    return seen


def run(*arguments: str, stdin: str | None = None) -> tuple[str, str]:
    """Text and numbers of one run."""
    result = CliRunner().invoke(command, ["folder", *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    text, _, numbers = result.stdout.rstrip("\n").rpartition("\n")
    return text, numbers


def test_text_then_numbers() -> None:
    text, numbers = run("the cat", "--max-tokens", "20")
    assert text
    assert re.fullmatch(
        r"\d+ tokens, [\d.]+ tokens/s after the first, first token after [\d.]+ s,  ?peak .*cpu [\d.]+ .iB", numbers
    )


@pytest.mark.slow
def test_prompt_lookup_changes_no_token() -> None:
    plain, _ = run("the cat the cat the", "--max-tokens", "20")
    looked_up, _ = run("the cat the cat the", "--max-tokens", "20", "--prompt-lookup", "4")
    assert looked_up == plain


def test_memory_is_planned_for_the_given_context(loaded: dict[str, Any]) -> None:
    run("the cat", "--max-tokens", "2")
    assert loaded["context_length"] is None
    run("the cat", "--max-tokens", "2", "--context", str(2 * GROWTH))
    assert loaded["context_length"] == 2 * GROWTH
    assert loaded["padded"] is False


def test_memory_is_planned_for_whole_steps_of_the_cache(loaded: dict[str, Any]) -> None:
    run("the cat", "--max-tokens", "2", "--context", str(GROWTH + 1))
    assert loaded["context_length"] == 2 * GROWTH


def test_the_text_is_the_models_own_greedy_continuation() -> None:
    import torch

    text, _ = run("the cat", "--max-tokens", "12")
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = tiny_model().generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
        )[0, ids.shape[1] :]
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.slow
def test_a_seed_repeats_and_standard_input_is_a_prompt() -> None:
    arguments = ("--temperature", "1.5", "--seed", "3", "--max-tokens", "30")
    first, _ = run("the cat", *arguments)
    again, _ = run("-", *arguments, stdin="the cat")
    other, _ = run("the cat", "--temperature", "1.5", "--seed", "4", "--max-tokens", "30")
    assert first == again
    assert first != other


def test_placement_options_reach_the_loader(loaded: dict[str, Any]) -> None:
    run("x", "--max-memory", "0=1GiB,cpu=2GiB", "--device-map", "balanced", "--dtype", "bfloat16", "--max-tokens", "1")
    assert loaded["max_memory"] == {0: "1GiB", "cpu": "2GiB"}
    assert loaded["device_map"] == "balanced"
    assert loaded["dtype"] == "bfloat16"
    assert loaded["model"] == "folder"


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    result = CliRunner().invoke(command, ["folder", "x" * 2000])
    assert result.exit_code != 0
    assert "2000 tokens" in str(result.exception)
    assert not Path("folder").exists()


def test_a_message_that_the_template_refuses_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", "{{ raise_exception('no more') }}")
    result = CliRunner().invoke(command, ["folder", "x", "--chat"])
    assert isinstance(result.exception, ServeError)
    assert "no more" in str(result.exception)


@pytest.mark.parametrize("prompt", ["\udcff", "-"])
def test_a_prompt_that_is_not_text_is_rejected(prompt: str) -> None:
    result = CliRunner().invoke(command, ["folder", prompt], input=b"\xff\xfe")
    assert isinstance(result.exception, ServeError)
    assert "is not utf-8 text" in str(result.exception)


def test_what_becomes_of_parts_that_do_not_fit_is_passed_on(loaded: dict[str, Any]) -> None:
    run("the cat", "--max-tokens", "1")
    assert (loaded["offload"], loaded["offload_dtype"], loaded["host_kernels"]) == ("stream", None, "exact")
    quantised = ("--offload-dtype", "int8", "--offload-folder", "scratch")
    run("the cat", "--max-tokens", "1", "--offload", "compute", *quantised, "--host-kernels", "packed")
    assert (loaded["offload"], loaded["offload_dtype"], loaded["host_kernels"]) == ("compute", "int8", "packed")
    assert loaded["offload_folder"] == "scratch"


def test_a_peak_that_the_host_does_not_record_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigmodel.devices.memory._STATUS", tmp_path / "no status")
    assert peak_text("cpu") == "unknown"


@pytest.mark.slow
def test_the_checkpoints_own_head_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def with_head(model: str, **options: Any) -> Loaded:
        seen.update(options, model=model)
        return Loaded(tiny_model(), tiny_tokenizer())

    monkeypatch.setattr(bigmodel.server.loading, "load_with_head", with_head)
    run("the cat", "--max-tokens", "2", "--speculate", "mtp")
    assert (seen["model"], seen["draft_tokens"]) == ("folder", 1)
    run("the cat", "--max-tokens", "2", "--speculate", "mtp", "--draft-tokens", "3")
    assert seen["draft_tokens"] == 3
    both = CliRunner().invoke(command, ["folder", "the cat", "--speculate", "mtp", "--draft-model", "other"])
    assert both.exit_code == 2


@pytest.mark.parametrize(
    ("options", "most"),
    [((), 0), (("--prompt-lookup", "5"), 5), (("--draft-model", "folder"), 4)],
    ids=["nothing", "prompt lookup", "a draft model"],
)
def test_the_plan_is_asked_for_what_is_proposed(options: tuple[str, ...], most: int, loaded: dict[str, Any]) -> None:
    loads: list[int] = []
    monkey = bigmodel.server.loading.load

    def load(model: str, **given: Any) -> Loaded:
        loads.append(given["draft_tokens"])
        return monkey(model, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigmodel.server.loading, "load", load)
        run("the cat", "--max-tokens", "2", *options)
    assert loads[0] == most
