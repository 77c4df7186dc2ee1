"""Which modules are questions."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from bigmodel.benchmarks.command import questions

OURS = {"memory", "load", "decode", "resident", "cold", "budget", "overlap", "pipeline", "overhead", "threads"}


def test_every_question_is_found_with_its_words() -> None:
    found = questions()
    assert set(found) >= OURS
    assert all(found[name].endswith("?") or "." in found[name] for name in OURS)


@pytest.mark.parametrize("name", questions())
def test_a_question_that_refuses_cuda_says_why(name: str) -> None:
    module: Any = importlib.import_module(f"bigmodel.benchmarks.{name.replace('-', '_')}")
    assert "cuda" in module.DEVICES or module.ONLY


def test_what_questions_share_is_none() -> None:
    assert not {"command", "checkpoints", "models", "steps", "blocks"} & set(questions())
