from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bigmodel.devices import nvml
from bigmodel.profile.machine import timing as stopwatch
from bigmodel.profile.machine.timing import QUICK, Effort, seconds_of

CPU = torch.device("cpu")


class Worker:
    """Work that takes the given seconds, one after another, then those of the last; by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, self.calls = 0.0, 0
        self._seconds = seconds
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    return lambda *seconds: Worker(monkeypatch, *seconds)


def test_the_first_call_does_not_count(worker: Callable[..., Worker]) -> None:
    assert seconds_of(worker(9.0, 1.0), CPU, repeats=1) == 1.0


def test_the_minimum_of_several_runs_counts(worker: Callable[..., Worker]) -> None:
    assert seconds_of(worker(0.0, 3.0, 1.0, 2.0), CPU, repeats=3) == 1.0
    assert seconds_of(worker(0.0, 3.0, 1.0, 2.0), CPU, repeats=1) == 3.0


def test_short_work_is_called_until_a_run_is_long_enough(worker: Callable[..., Worker]) -> None:
    work = worker(0.25)
    assert seconds_of(work, CPU, at_least=16.0, repeats=2) == 0.25
    assert work.calls == 1 + 1 + 64 + 64  # untimed, too short, long enough, and once more


def test_timing_of_work_without_duration_ends(worker: Callable[..., Worker]) -> None:
    assert seconds_of(worker(0.0), CPU, at_least=1.0, repeats=1) == 0.0


@pytest.mark.parametrize("effort", [Effort(), QUICK])
def test_sizes_ascend(effort: Effort) -> None:
    for sizes in (effort.rows, effort.moved, effort.copied, [side for side, _ in effort.images]):
        assert list(sizes) == sorted(set(sizes))
    assert len(effort.copied) == 2


def test_the_two_models_are_one_of_many_small_matrices_and_one_of_few_large_ones() -> None:
    for effort in (Effort(), QUICK):
        (narrow, deep), (wide, shallow) = effort.models
        assert narrow < wide
        assert deep > shallow


def test_the_quick_effort_is_smaller_in_every_field() -> None:
    whole = Effort()
    for name in ("width", "spread", "at_least", "repeats", "file", "prompt"):
        assert getattr(QUICK, name) < getattr(whole, name)


def test_all_devices_that_are_used_are_waited_for_and_not_only_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 2 has no context of this process: to wait for it would open one."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(nvml, "has_context", lambda index: index == 0)
    stopwatch.synchronize(torch.device("cuda", 1))
    assert waited == [0, 1]
