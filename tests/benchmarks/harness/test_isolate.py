"""Work in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bigmodel.benchmarks.harness import BenchmarkError, run_isolated


@pytest.fixture
def preloaded_processes() -> None:
    """The processes of these tests are fresh interpreters."""


def describe(word: str) -> dict[str, object]:
    print("what work prints does not disturb its result")
    return {"word": word, "process": os.getpid(), "torch": "torch" in sys.modules}


def fail() -> None:
    raise ValueError("not like this")


def wait_for_ever() -> None:
    import threading

    threading.Event().wait()


@pytest.mark.slow
def test_the_result_comes_from_a_fresh_interpreter() -> None:
    found = run_isolated(describe, word="hello")
    assert found["word"] == "hello"
    assert found["process"] != os.getpid()
    assert found["torch"] is False


@pytest.mark.slow
def test_a_failure_is_told_with_its_last_words() -> None:
    with pytest.raises(BenchmarkError, match=r"fail failed in its own process.*ValueError: not like this"):
        run_isolated(fail)


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_isolated(wait_for_ever, timeout=0.1)
