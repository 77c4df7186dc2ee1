"""`bigmodel generate --lora`: the text of peft's model, with a base model placed, streamed or quantised as any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigmodel.cli.main import run
from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.profile.machine.machine import nominal_machine
from bigmodel.server.adapters.files import adapters_bytes, read_adapter
from bigmodel.server.loading import PlannedModel, load
from tests.examples import alike
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.quantized.checkpoints import published
from tests.quantized.twins import packed
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.oracle import generate
from tests.server.tiny import make_request, tiny_model, tiny_tokenizer

PROMPT = "the cat"
LAYERS, NEW_TOKENS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters."""
    folder = tmp_path_factory.mktemp("generated")
    tiny_model(layers=LAYERS).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for seed, name in enumerate(("legal", "terse")):
        write_adapter(tiny_model(layers=LAYERS), folder / name, seed, rank=8)
    return folder


@pytest.fixture(autouse=True)
def nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.plan.planner.measured_machine", nominal_machine)


def pefts(model: Any, adapter: Path | None, prompt: str = PROMPT) -> str:
    """What a model continues a prompt with, as peft adapts it."""
    greedy = make_request([1], temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True).params
    one = model if adapter is None else adapted(model, adapter)
    return str(tiny_tokenizer().decode(generate(one, tiny_tokenizer(), tiny_tokenizer().encode(prompt), greedy)))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The text of one run with a prompt."""
    capsys.readouterr()  # what libraries have said so far
    assert run(["generate", *map(str, arguments), "--max-tokens", str(NEW_TOKENS), "--quiet"]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.long
@pytest.mark.slow
def test_the_text_is_that_of_pefts_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, adapter in (("legal", "legal"), ("other=terse", "terse")):
        name, _, path = given.rpartition("=")
        lora = f"{name}={folder / path}" if name else folder / path
        found = said(capsys, folder / "model", PROMPT, "--lora", lora, "--max-memory", "cpu=1GB", "--context", "64")
        assert found == pefts(tiny_model(layers=LAYERS), folder / adapter)
    plain = said(capsys, folder / "model", PROMPT, "--max-memory", "cpu=1GB", "--context", "64")
    assert plain == pefts(tiny_model(layers=LAYERS), None) != found


@pytest.mark.slow
def test_weights_are_streamed_within_a_budget_that_adapters_are_part_of(
    folder: Path, capsys: pytest.CaptureFixture[str], accelerators: None
) -> None:
    planned = PlannedModel(str(folder / "model"), {"context_length": 128, "padded": False})
    plan = planned.plan({0: 10**9, "cpu": 10**9})
    budget = plan.devices[0].total * 6 // 10 + adapters_bytes([read_adapter("legal", folder / "legal")])
    reset_peak_memory(0)
    options = ("--max-memory", f"0={budget},cpu=1GB", "--context", "64")
    found = said(capsys, folder / "model", PROMPT, "--lora", folder / "legal", *options)
    assert found == pefts(tiny_model(layers=LAYERS), folder / "legal")
    assert max_memory_allocated(0) <= budget


@pytest.mark.slow
def test_quantised_weights_are_adapted_as_peft_adapts_the_restored_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = published(tmp_path / "q", packed(), vocab_size=512).eval()
    tiny_tokenizer().save_pretrained(tmp_path / "q")
    write_adapter(restored, tmp_path / "legal", 1, lora_alpha=64)
    found = said(capsys, tmp_path / "q", PROMPT, "--lora", tmp_path / "legal", "--device-map", "cpu", "--context", "64")
    assert found == pefts(restored, tmp_path / "legal") != pefts(restored, None)


def write_prompts(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, str]:
    return {line["id"]: line["text"] for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
@alike("placing", [("--device-map", "auto"), ("--device-map", "balanced")], first=1)
def test_lines_of_a_file_name_their_adapters(
    folder: Path, tmp_path: Path, placing: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["legal", "", "terse", "legal"]
    lines = [{"id": f"{n}", "prompt": PROMPT, "adapter": name} for n, name in enumerate(names)]
    file = ("--batch-file", write_prompts(tmp_path / "prompts", *lines), "--output", tmp_path / "answers")
    both = ("--lora", folder / "legal", "--lora", folder / "terse")
    said(capsys, folder / "model", *file, *both, "--max-memory", "cpu=1GB", *placing)
    wanted = {name: pefts(tiny_model(layers=LAYERS), folder / name if name else None) for name in set(names)}
    assert answers(tmp_path / "answers") == {f"{n}": wanted[name] for n, name in enumerate(names)}


@pytest.mark.slow
def test_the_only_adapter_computes_lines_that_name_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load_and_keep(*arguments: Any, **options: Any) -> Any:
        loaded.append(load(*arguments, **options))
        return loaded[0]

    monkeypatch.setattr("bigmodel.server.loading.load", load_and_keep)
    asked = write_prompts(tmp_path / "prompts", {"id": "0", "prompt": PROMPT})
    file = ("--batch-file", asked, "--output", tmp_path / "answers")
    said(capsys, folder / "model", *file, "--lora", folder / "legal", "--batch-size", "1", "--max-memory", "cpu=1GB")
    (one,) = loaded
    assert one.plan.devices["cpu"].budget == 10**9 - adapters_bytes(one.adapters)
    assert answers(tmp_path / "answers") == {"0": pefts(tiny_model(layers=LAYERS), folder / "legal")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"), [({}, "it names no adapter; there are legal, terse"), ({"adapter": "x"}, "no adapter 'x'")]
)
def test_a_line_without_its_adapter_ends_the_run_before_anything_is_loaded(
    folder: Path, tmp_path: Path, line: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = write_prompts(tmp_path / "prompts", {"id": "p", "prompt": PROMPT, **line})
    both = ("--lora", folder / "legal", "--lora", folder / "terse")
    given = (folder / "model", "--batch-file", asked, "--output", tmp_path / "answers", *both)
    assert run(["generate", *map(str, given)]) == 1
    assert f"prompt 'p': {says}" in " ".join(capsys.readouterr().err.split()).replace("there is ", "")


@pytest.mark.slow
def test_a_prompt_has_one_adapter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--lora", str(folder / "legal"), "--lora", str(folder / "terse"))
    assert run(["generate", "no-such-model", PROMPT, *both]) == 2
    assert "one adapter computes PROMPT" in " ".join(capsys.readouterr().err.replace("│", " ").split())
