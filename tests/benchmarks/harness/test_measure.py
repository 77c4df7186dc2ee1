"""Rounds: every variant once in each, in an order drawn anew; disturbed rounds are run again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bigmodel.benchmarks.harness import Samples, Variant, measure
from bigmodel.benchmarks.harness.neighbours import Usage

NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No neighbours, whatever else runs on this machine."""
    neighbours(monkeypatch, iter(lambda: 0.0, None))
    monkeypatch.setattr(sys.modules["bigmodel.benchmarks.harness.measure"], "PATIENCE", 2)


def neighbours(monkeypatch: pytest.MonkeyPatch, shares: Iterator[float]) -> None:
    module = sys.modules["bigmodel.benchmarks.harness.measure"]
    monkeypatch.setattr(module, "usage", lambda: Usage(0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "neighbours_share", lambda before, after: next(shares))


def counting(log: list[str]) -> list[Variant]:
    def variant(name: str) -> Variant:
        def run() -> float:
            log.append(name)
            return float(len(log))

        return Variant(name, run, lambda: log.append(f"prepare {name}"))

    return [variant(name) for name in NAMES]


def test_each_round_runs_every_variant_once() -> None:
    log: list[str] = []
    samples = measure(counting(log), rounds=4, warmup=1)
    ran = [entry for entry in log if entry in NAMES]
    assert [sorted(ran[start : start + 3]) for start in range(0, 15, 3)] == [NAMES] * 5
    assert all(len(samples.of(name)) == 4 for name in NAMES)


def test_orders_differ_between_rounds_and_are_the_same_for_the_same_seed() -> None:
    first, again = measure(counting([]), 10, seed=1), measure(counting([]), 10, seed=1)
    assert first.orders == again.orders
    assert len({tuple(order) for order in first.orders}) > 1
    assert measure(counting([]), 10, seed=2).orders != first.orders


def test_the_warm_up_is_not_kept() -> None:
    values = iter([100.0, 1.0, 2.0])
    assert measure([Variant("a", lambda: next(values))], rounds=2, warmup=1).of("a") == [1.0, 2.0]


def test_preparation_comes_right_before_each_run() -> None:
    log: list[str] = []
    measure(counting(log), rounds=2, warmup=0)
    assert all(log[index] == f"prepare {log[index + 1]}" for index in range(0, len(log), 2))


def test_a_variant_may_measure_several_figures() -> None:
    samples = measure([Variant("a", lambda: {"seconds": 2.0, "bytes": 8.0})], rounds=1)
    assert (samples.median("a"), samples.median("a", "bytes")) == (2.0, 8.0)


def test_disturbed_rounds_are_run_again_and_the_quiet_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours(monkeypatch, iter([0.0, 0.9, 0.0, 0.5, 0.01]))
    values = iter(float(number) for number in range(10))
    samples = measure([Variant("a", lambda: next(values))], rounds=3, warmup=0)
    assert samples.of("a") == [0.0, 2.0, 4.0]
    assert (samples.neighbours, samples.disturbed) == ([0.0, 0.0, 0.01], 2)


def test_patience_ends_and_then_the_quietest_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours(monkeypatch, iter([0.9, 0.3, 0.8, 0.2]))
    values = iter(float(number) for number in range(10))
    samples = measure([Variant("a", lambda: next(values))], rounds=2, warmup=0)
    assert samples.of("a") == [1.0, 3.0]
    assert samples.disturbed == 2


@pytest.mark.parametrize(
    ("variants", "rounds", "message"),
    [
        ([], 1, "nothing to measure"),
        ([Variant("a", lambda: 0.0), Variant("a", lambda: 0.0)], 1, "different names"),
        ([Variant("a", lambda: 0.0)], 0, "at least one round"),
    ],
)
def test_what_cannot_be_measured_is_refused(variants: list[Variant], rounds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(variants, rounds)


def test_a_failing_variant_ends_the_measurement() -> None:
    def fail() -> float:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        measure([Variant("a", fail)], rounds=1)


def test_ratios_are_taken_within_the_samples() -> None:
    samples = Samples()
    for fast, slow in [(1.0, 2.0), (2.0, 4.0)]:
        samples.add("fast", fast)
        samples.add("slow", slow)
    assert samples.ratio("slow", "fast").median == 2.0


def test_disturbed_rounds_are_not_run_again_when_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["bigmodel.benchmarks.harness.measure"], "PATIENT_SECONDS", 0.0)
    neighbours(monkeypatch, iter(lambda: 0.5, None))
    log: list[str] = []
    samples = measure(counting(log), rounds=2, warmup=0)
    assert samples.disturbed == 0
    assert sum(entry in NAMES for entry in log) == 2 * len(NAMES)
