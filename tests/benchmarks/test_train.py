"""Questions about training: they are asked in tiny sizes, and the figures fit together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bigmodel.benchmarks import train_example
from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.train_scaling import SETTINGS, TrainingRun
from bigmodel.train import AcceleratorState, GradientState

from .answering import answer, limit, rows

accelerate = pytest.importorskip(
    "accelerate.state", reason="accelerate, which is measured beside bigmodel, is not installed"
)


_RUN = subprocess.run


@pytest.fixture(autouse=True)
def _states_of_their_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.GradientState._reset_state()


@pytest.mark.slow
def test_overhead_is_what_a_step_takes_beyond_the_bare_loop(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["train_overhead", "--step", "0.5"], workdir, capsys)
    bare, ours, theirs = rows(found)
    for row in (ours, theirs):
        assert row["added"] == pytest.approx(row["tiny step"] - bare["tiny step"])
        assert row["of a step"] == pytest.approx(row["added"] / 0.5)
    assert limit(found, "added by bigmodel to a step of 500 ms")["measured"] == pytest.approx(ours["of a step"])


@pytest.mark.slow
def test_a_saved_state_is_on_the_disk_beside_a_raw_write(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["save_state"], workdir, capsys)
    raw, ours, _ = rows(found)
    assert ours["speed"] == pytest.approx(6_000_000 / ours["seconds"])
    assert limit(found, "speed of bigmodel")["measured"] == pytest.approx(raw["seconds"] / ours["seconds"])
    assert not (workdir / "save_state").exists()


def test_the_example_is_compared_by_the_samples_it_says_it_trained_on(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_example, "Example", lambda processes, length: lambda: 0.01 / processes)
    found = answer(["train_example"], workdir, capsys)
    assert [row["samples/s"] for row in rows(found)] == ["100.0", "200.0"]
    assert limit(found, "samples/s of 2 processes over 1")["measured"] == pytest.approx(2)


def test_an_example_that_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('no text')"
    monkeypatch.setattr(subprocess, "run", partial(_instead, [sys.executable, "-c", script]))
    with pytest.raises(BenchmarkError, match="on 2 processes failed:\nno text"):
        train_example.Example(2, 100)()


def _instead(command: list[str], _: list[str], **options: Any) -> Any:
    return _RUN(command, **options)


@pytest.mark.slow
def test_processes_wait_for_their_turn_and_end() -> None:
    sizes = {"batch": 2, "tokens": 4, "steps": 1, "tiny": True}
    with TrainingRun(*SETTINGS["1 process"], sizes) as run:
        assert run.wait() > 0
        assert run.train() > 0
        processes = run._processes
    assert [process.returncode for process in processes] == [0]
    failed = pytest.raises(BenchmarkError, match="training with no_such_library in 1 processes failed")
    with failed, TrainingRun("no_such_library", 1, sizes) as run:
        run.wait()
