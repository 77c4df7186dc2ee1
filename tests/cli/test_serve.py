"""`bigmodel serve`: what is typed becomes settings, a socket and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bigmodel.server.http.run
import bigmodel.server.loading
from bigmodel.cli.serve import serve
from bigmodel.errors import ServeError
from bigmodel.server import EngineOptions, Loaded, Loading, Settings
from bigmodel.server.http.keys import ApiKey
from bigmodel.server.models.pool import ModelPool
from tests.server.adapters.trained import write_adapter
from tests.server.models.several import save
from tests.server.tiny import tiny_model, tiny_tokenizer

command = typer.Typer()
command.command()(serve)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Instead of serving, keeps the application and the socket's address."""
    seen: dict[str, Any] = {"code": 0}

    def run(app: Any, listener: Any, **options: Any) -> int:
        seen.update(options, app=app, settings=app.state.server.settings, address=listener.getsockname())
        listener.close()
        return int(seen["code"])

    monkeypatch.setattr(bigmodel.server.http.run, "run", run)
    return seen


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["some/model", "--port", "0", *arguments])


def test_defaults(served: dict[str, Any]) -> None:
    result = invoke()
    assert result.exit_code == 0
    settings: Settings = served["settings"]
    assert settings.model_name == "some/model"
    assert settings.api_keys == ()
    assert settings.engine == EngineOptions()  # sequences at once and memory: the plan's
    assert served["address"][0] == "127.0.0.1"
    assert f"http://127.0.0.1:{served['address'][1]}" in result.stderr


def test_options_become_settings(served: dict[str, Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("second\n\nthird\n")
    invoke(
        *("--api-key", "first", "--api-key-file", str(keys), "--served-model-name", "mine"),
        *("--max-sequences", "3", "--max-queue", "5", "--kv-memory", "2GiB", "--max-model-len", "99"),
        *("--no-batch-invariant", "--no-prefix-cache", "--request-timeout", "7", "--drain-timeout", "9"),
        *("--max-body", "1MiB", "--max-batch-tokens", "256"),
        *("--steps-in-flight", "3"),
        *("--tool-parser", "hermes", "--reasoning-parser", "none"),
        *("--prefix-cache", str(tmp_path / "kept"), "--prefix-cache-size", "3GiB"),
        *("--batch-folder", str(tmp_path / "batches"), "--batch-folder-size", "2GiB"),
        *("--allowed-origins", "http://a.example,http://b.example:81", "--allowed-origins", "null"),
    )
    settings: Settings = served["settings"]
    assert [key.digest for key in settings.named_keys] == [
        ApiKey.of(key).digest for key in ("first", "second", "third")
    ]
    assert settings.model_name == "mine"
    assert (settings.request_timeout, settings.drain_timeout, settings.max_body_bytes) == (7, 9, 1 << 20)
    assert (settings.tool_parser, settings.reasoning_parser) == ("hermes", "none")
    engine = settings.engine
    assert (engine.max_sequences, engine.max_queue, engine.max_length) == (3, 5, 99)
    assert (engine.kv_bytes, engine.max_batch_tokens, engine.steps_in_flight) == (2 << 30, 256, 3)
    assert (engine.row_multiple, engine.prefix_cache) == (1, False)
    assert (engine.prefix_folder, engine.prefix_folder_bytes) == (tmp_path / "kept", 3 << 30)
    assert settings.allowed_origins == ("http://a.example", "http://b.example:81", "null")
    assert (settings.batches, settings.batch_folder) == (True, tmp_path / "batches")
    assert settings.batch_folder_bytes == served["app"].state.server.batches.limits.total_bytes == 2 << 30


def test_replicas_keep_no_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("bigmodel.cli.serve._replicate", lambda loader, settings, *_: asked.append(settings))
    assert invoke("--replicas", "2").exit_code == 0
    assert [settings.batches for settings in asked] == [False]
    result = invoke("--replicas", "2", "--batch-folder", str(tmp_path))
    assert result.exit_code == 2
    assert "--batch-folder" in result.stderr


def test_a_folder_of_batches_that_another_server_uses_is_named(served: dict[str, Any], tmp_path: Path) -> None:
    assert invoke("--batch-folder", str(tmp_path)).exit_code == 0
    again = invoke("--batch-folder", str(tmp_path))  # the first application is still there
    assert str(tmp_path) in str(again.exception)


def test_the_model_is_loaded_with_the_options_of_placing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> Loaded:
        asked.append({**options, "model": model})
        return Loaded(tiny_model(), tiny_tokenizer())

    def run(loader: Callable[[Loading], Loaded], *_: Any) -> int:
        loader(Loading())
        return 0

    monkeypatch.setattr(bigmodel.server.loading, "load", load)
    monkeypatch.setattr("bigmodel.cli.serve._serve", run)
    for options in ((), ("--offload", "compute", "--host-kernels", "packed")):
        assert invoke(*options).exit_code == 0
    assert [(one["model"], one["offload"], one["host_kernels"]) for one in asked] == [
        ("some/model", "stream", "exact"),
        ("some/model", "compute", "packed"),
    ]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two models."""
    return [save(tmp_path / name, seed) for seed, name in enumerate("ab")]


def several(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["--port", "0", *arguments])


def test_several_models_share_the_budgets(served: dict[str, Any], folders: list[str]) -> None:
    result = several(folders[0], f"other={folders[1]}", "--max-memory", "cpu=1GiB", "--keep-alive", "60")
    assert result.exit_code == 0, result.exception
    assert "serving a, other on http://127.0.0.1:" in result.stderr
    pool: ModelPool = served["app"].state.server.pool
    assert list(pool.models) == ["a", "other"]
    assert (pool.budgets, pool.keep_alive, pool.patience) == ({"cpu": 1 << 30}, 60, 120)
    assert served["settings"].model_name == "a"


@pytest.mark.slow
def test_each_of_several_models_has_its_own_adapters(
    served: dict[str, Any], folders: list[str], tmp_path: Path
) -> None:
    adapters = [write_adapter(tiny_model(seed), tmp_path / name, seed) for seed, name in enumerate(("legal", "terse"))]
    given = (f"--lora=a:legal={adapters[0]}", f"--lora=other:terse={adapters[1]}")
    result = several(folders[0], f"other={folders[1]}", "--max-memory", "cpu=1GiB", *given)
    assert result.exit_code == 0, result.exception
    state = served["app"].state.server
    assert {name: model.name for name, model in state.adapters.items()} == {"legal": "a", "terse": "other"}
    plain = several(folders[0], f"other={folders[1]}", f"--lora=legal={adapters[0]}")
    assert "does not say which model's adapter it is; write MODEL:NAME=FOLDER" in str(plain.exception)


def test_an_adapter_may_name_the_only_model(served: dict[str, Any]) -> None:
    assert invoke("--served-model-name", "mine", "--lora", "mine:legal=x", "--lora", "terse=y").exit_code == 0
    assert served["settings"].adapters == ("legal", "terse")


def test_one_model_that_stays_loaded_is_not_waited_for(served: dict[str, Any]) -> None:
    for options, patience in (((), 0), (("--keep-alive", "60", "--load-timeout", "7"), 7)):
        assert invoke(*options).exit_code == 0
        assert served["app"].state.server.pool.patience == patience


def test_two_models_of_one_name_or_without_a_model_are_refused(served: dict[str, Any], folders: list[str]) -> None:
    for wrong, said in ((f"a={folders[1]}", "two models are called 'a'"), (f"{folders[0]}/none", "no such folder")):
        result = several(folders[0], wrong)
        assert said in str(result.exception)
    assert not served.get("app")


@pytest.mark.parametrize(
    "options", [("--served-model-name", "x"), ("--draft-model", "x"), ("--replicas", "2"), ("--trust-remote-code",)]
)
def test_options_of_one_model_are_refused_for_several(
    served: dict[str, Any], folders: list[str], options: tuple[str, ...]
) -> None:
    result = several(*folders, *options)
    assert result.exit_code == 2
    assert options[0] in result.stderr
    assert not served.get("app")


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe"])
def test_a_file_without_keys_does_not_leave_the_server_open(
    served: dict[str, Any], tmp_path: Path, content: bytes
) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    result = invoke("--api-key-file", str(keys))
    assert isinstance(result.exception, ServeError)
    assert str(keys) in str(result.exception)
    assert "settings" not in served


@pytest.mark.parametrize("option", ["--tool-parser", "--reasoning-parser"])
def test_a_parser_that_there_is_not_is_refused(served: dict[str, Any], option: str) -> None:
    result = invoke(option, "other")
    assert isinstance(result.exception, ServeError)
    assert "there are auto, none, " in str(result.exception)


def test_a_key_in_the_environment_counts(served: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGMODEL_API_KEY", "hidden")
    invoke()
    assert served["settings"].api_keys == ("hidden",)


def test_the_servers_exit_code_is_the_commands(served: dict[str, Any]) -> None:
    served["code"] = 1
    assert invoke().exit_code == 1


@pytest.mark.parametrize("wrong", ["0", "0=", "=1GiB", "0=1GiB,,cpu=2GiB"])
def test_an_unreadable_budget_is_refused(served: dict[str, Any], wrong: str) -> None:
    result = invoke("--max-memory", wrong)
    assert result.exit_code != 0
    assert "DEVICE=SIZE" in str(result.exception)


@pytest.mark.parametrize(("option", "value"), [("--log-level", "loud"), ("--port", "65536"), ("--port", "-1")])
def test_what_cannot_be_is_wrong_usage(option: str, value: str) -> None:
    result = invoke(option, value)
    assert result.exit_code == 2
    assert option in result.stderr
