"""transformers' Trainer on two launched processes, plainly, sharded and by DeepSpeed: they inherit the stand-in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.launch.starting import launched
from tests.preloaded import python_executable

from .answers import ALONE, PROGRAMS, read_answers
from .test_stand_in import VERSION

MODULES = ("transformers.trainer", "transformers.models.llama.modeling_llama")
DEEPSPEED = ("deepspeed", "transformers.integrations.deepspeed", "torch._inductor.compile_fx")
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.mark.slow  # a launcher and two processes; one start for all kinds
def test_it_trains_and_resumes_with_the_losses_of_plain_training(tmp_path: Path) -> None:
    kinds = ["plain", "seq2seq", "fsdp"]
    found = answers_of(tmp_path, kinds)
    predicted = [found.pop(f"seq2seq: predicted {rank}") for rank in (0, 1)]
    assert predicted[0] == predicted[1]
    assert len(predicted[0][0]) == 16  # the trainer keeps the rows that fill the last round, under accelerate, too
    trained = [(found.pop(f"seq2seq: losses {rank}"), found.pop(f"seq2seq: resumed {rank}")) for rank in (0, 1)]
    assert trained[0] == trained[1]
    assert (len(trained[0][0]), trained[0][1]) == (4, True)
    kinds.remove("seq2seq")
    check(found, kinds)


@pytest.mark.long
@pytest.mark.slow
def test_deepspeed_older_shards_and_shards_in_half_precision_train_and_resume_as_well(tmp_path: Path) -> None:
    kinds = ["plain", "fsdp 1", "fsdp bf16", *(["deepspeed 2"] if HAS_DEEPSPEED else [])]
    check(answers_of(tmp_path, kinds), kinds)


def answers_of(folder: Path, kinds: list[str]) -> dict[str, Any]:
    """The answers of the program that trains each kind, of both processes."""
    python = python_executable(*MODULES, *(DEEPSPEED if "deepspeed 2" in kinds else ()), prelude=ALONE)
    environment = {"BIGMODEL_COMPAT": "1", "DS_ACCELERATOR": "cpu", "PYTHON_EXEC": str(python)}
    flags = ("--cpu", "--num_processes", 2)
    return read_answers(launched(*flags, PROGRAMS / "trainers.py", folder, *kinds, env=environment))


def check(found: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        for rank in (0, 1):
            precision = 2e-2 if "bf16" in kind else 1e-6
            assert found[f"{kind}: losses {rank}"] == pytest.approx(found["plain: losses 0"], rel=precision), kind
            assert found[f"{kind}: resumed {rank}"], kind
            assert found[f"{kind}: saved {rank}"], kind
    assert (found["version 0"], found["version 1"]) == (VERSION, VERSION)
    assert found["run under the stand-in 0"]
    assert found["run under the stand-in 1"]
    assert len(found) == 4 + 6 * len(kinds)
