"""Decoding on the host beside llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.benchmarks.checkpoints import checkpoint
from bigmodel.benchmarks.gguf_writer import gguf_of
from bigmodel.benchmarks.harness import Samples
from bigmodel.benchmarks.host_decode import LIMITS, OURS, limits
from bigmodel.benchmarks.llama_cpp import PEER
from bigmodel.benchmarks.packed import WHOLE, quantised
from bigmodel.dispatch import from_pretrained

from .answering import answer, rows

TARGETS = [name for name in LIMITS if name != WHOLE]


@pytest.mark.slow
def test_a_step_and_a_prompt_of_each_kind_of_weights_are_timed(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(["host_decode", "--no-peers"], workdir, capsys)
    for table in (0, 1):
        assert [(row["weights"], row["program"]) for row in rows(found, table)] == [(name, OURS) for name in LIMITS]
        assert all(row["median"] > 0 for row in rows(found, table))
    assert found["limits"] == []
    assert any("pip install xllamacpp" in note for note in found["notes"])


@pytest.mark.slow
def test_llama_cpp_is_timed_in_the_same_rounds(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    found = answer(["host_decode"], workdir, capsys)
    for table in (0, 1):
        programs = [(row["weights"], row["program"]) for row in rows(found, table)]
        assert programs == [(name, program) for name in LIMITS for program in (OURS, PEER)]
        assert all(row["median"] > 0 for row in rows(found, table))
    assert [limit["bound"] for limit in found["limits"]] == list(LIMITS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", WHOLE, *TARGETS])
def test_a_gguf_file_has_the_values_of_its_checkpoint(name: str, workdir: Path) -> None:
    folder = checkpoint("tiny", workdir) if name == "float32" else quantised("tiny-half", TARGETS, workdir)[name]
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected = from_pretrained(folder, "cpu", context_length=16)(tokens).logits
        assert torch.equal(from_pretrained(gguf_of(folder), "cpu", context_length=16)(tokens).logits, expected)


def test_each_kind_of_weights_has_its_limit() -> None:
    seconds = {f"{name}, {OURS}": {"seconds": [most]} for name, most in LIMITS.items()}
    seconds |= {f"{name}, {PEER}": {"seconds": [1.0]} for name in LIMITS}
    assert [(limit.bound, limit.kept) for limit in limits(Samples(seconds))] == [
        (most, True) for most in LIMITS.values()
    ]
    seconds[f"int8, {OURS}"] = {"seconds": [1.26]}
    assert [limit.kept for limit in limits(Samples(seconds))] == [True, False, True]
