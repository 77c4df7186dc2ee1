"""llama.cpp's server, through the package xllamacpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.checkpoints import checkpoint
from bigmodel.benchmarks.gguf_writer import gguf_of
from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.llama_cpp import PACKAGE, LlamaServer, build, is_installed

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")

CONTEXT = 256
PROMPT = [*range(3, 67)]


@pytest.fixture
def server(workdir: Path, tmp_path: Path) -> LlamaServer:
    return LlamaServer(gguf_of(checkpoint("tiny", workdir)), context=CONTEXT, threads=1, saved=tmp_path)


def counts(timings: dict[str, float]) -> tuple[float, float]:
    """Tokens of the prompt that the slot had, and those that were computed."""
    return timings["cache_n"], timings["prompt_n"]


@pytest.mark.slow
def test_a_restored_slot_has_the_tokens_of_its_file(server: LlamaServer, tmp_path: Path) -> None:
    server.complete(PROMPT, 1)
    assert server.save("slot.bin") == len(PROMPT)
    assert [file.name for file in tmp_path.iterdir()] == ["slot.bin"]
    assert server.erase() == len(PROMPT)
    assert server.restore("slot.bin") == len(PROMPT)
    assert counts(server.complete([*PROMPT, 7, 8], 1, reuse=True)) == (len(PROMPT), 2)


@pytest.mark.slow
def test_an_erased_slot_is_all_that_remembered_a_prompt(server: LlamaServer) -> None:
    server.complete(PROMPT, 1)
    assert counts(server.complete([*PROMPT, 7, 8], 1, reuse=True)) == (len(PROMPT), 2)
    server.erase()
    assert counts(server.complete([*PROMPT, 7, 8], 1, reuse=True)) == (0, len(PROMPT) + 2)


@pytest.mark.slow
def test_a_prompt_is_computed_again_unless_the_slot_is_reused(server: LlamaServer) -> None:
    for _ in range(2):
        timings = server.complete(PROMPT, 4)
        assert counts(timings) == (0, len(PROMPT))
        assert timings["predicted_n"] == 4


@pytest.mark.slow
def test_what_is_refused_says_why(server: LlamaServer) -> None:
    with pytest.raises(BenchmarkError, match=r"refused a prompt of 300 tokens.*context size"):
        server.complete([5] * 300, 1)
    with pytest.raises(BenchmarkError, match="did not restore its slot: 400"):
        server.restore("missing.bin")


def test_its_build_is_told() -> None:
    assert is_installed()
    name, _, features = build().partition(": ")
    assert name.split()[0] == PACKAGE
    assert all(feature.replace("_", "").isalnum() for feature in features.split(", "))
