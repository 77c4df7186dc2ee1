"""bigmodel in accelerate's place under transformers, beside accelerate."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bigmodel.benchmarks.stand_in import BEGIN, OURS
from tests.compat.answers import ALONE
from tests.preloaded import run

from .answering import answer, limit, rows
from .conftest import MODULES


class Preloaded:
    """Has the name of the module `subprocess` that the question uses. Programs are forked from interpreters that have
    imported what they need."""

    @staticmethod
    def run(command: Sequence[str], *, env: dict[str, str], **_options: Any) -> subprocess.CompletedProcess[str]:
        """Run an interpreter to its end."""
        is_ours = BEGIN[OURS] in command[2]
        return run(command[1:], env, modules=MODULES, prelude=ALONE if is_ours else "")


@pytest.mark.long
@pytest.mark.slow
def test_steps_loads_and_imports_are_measured_and_tokens_are_equal(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("bigmodel.benchmarks.stand_in"), "subprocess", Preloaded)
    found = answer(["stand_in"], workdir, capsys)
    both = {"bigmodel", "accelerate"}
    in_memory = {*both, "the model in memory"}
    assert [{row["variant"] for row in rows(found, table)} for table in range(4)] == [both, in_memory, both, both]
    assert limit(found, "both give the same tokens")["kept"]
    assert limit(found, "memory for 75% of the weights, times faster than with accelerate")["bound"] == 3
