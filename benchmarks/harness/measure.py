"""Measures named variants in rounds: each round runs every variant once, in random order.

The conditions of a machine drift: its clock, its disk, other processes. Variants measured one after the other would run
under different conditions, and a fixed order favours the last one. Interleaved in random order they share the drift.
Rounds in which other processes used much CPU time are repeated, unless that takes long; only that decides which rounds
count, never the measured values.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .neighbours import neighbours_share, usage
from .progress import RoundProgress
from .summary import Summary, ratio, summarise

Measured: TypeAlias = "float | Mapping[str, float]"
"""Result of one run: seconds, or several named figures."""

SECONDS = "seconds"

QUIET = 0.05
"""Share of all cores that other processes may take in a round that counts."""

PATIENCE = 2
"""Rounds are repeated up to this many times to find undisturbed ones."""

PATIENT_SECONDS = 30.0
"""Seconds of rounds after which none is repeated: a benchmark of long rounds would take twice its time."""


@dataclass(frozen=True)
class Variant:
    """One variant of a comparison.

    Attributes:
        name: Its name in the table.
        run: Does the work once and returns the measured figures.
        prepare: Called before each run, unmeasured, for example to evict caches.
    """

    name: str
    run: Callable[[], Measured]
    prepare: Callable[[], object] | None = None


@dataclass
class Samples:
    """The figures of each variant, round by round.

    Attributes:
        values: One value per round, by variant and figure.
        orders: The order of the variants in each round.
        neighbours: Fraction of all cores that other processes used, in each round.
        disturbed: Number of rounds that were discarded because of that.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    neighbours: list[float] = field(default_factory=list)
    disturbed: int = 0

    def of(self, variant: str, figure: str = SECONDS) -> list[float]:
        """Return the values of one figure by round."""
        return self.values[variant][figure]

    def summary(self, variant: str, figure: str = SECONDS) -> Summary:
        """Return the summary of one figure."""
        return summarise(self.of(variant, figure))

    def median(self, variant: str, figure: str = SECONDS) -> float:
        """Return the median of one figure."""
        return self.summary(variant, figure).median

    def ratio(self, variant: str, baseline: str, figure: str = SECONDS) -> Summary:
        """Return one figure of `variant` over that of `baseline`: see `summary.ratio`."""
        return ratio(self.of(variant, figure), self.of(baseline, figure))

    def add(self, variant: str, measured: Measured) -> None:
        """Append the figures of one run."""
        figures = {SECONDS: float(measured)} if isinstance(measured, (int, float)) else dict(measured)
        kept = self.values.setdefault(variant, {})
        for name, value in figures.items():
            kept.setdefault(name, []).append(float(value))


def measure(variants: Iterable[Variant], rounds: int, warmup: int = 1, seed: int = 0) -> Samples:
    """Measure `variants` in `rounds` rounds, after `warmup` rounds whose figures are discarded.

    Args:
        variants: The variants; names must differ.
        rounds: Values of each variant; at least one.
        warmup: Rounds before that.
        seed: Seed of the orders.

    Raises:
        ValueError: No variants, two of the same name, or no rounds.
    """
    given = list(variants)
    _check(given, rounds, warmup)
    draw = random.Random(seed)
    done: list[_Round] = []
    begun = time.perf_counter()
    with RoundProgress(len(given) * (rounds + warmup)) as progress:
        for number in range(-warmup, PATIENCE * rounds):
            late = len(done) >= rounds and time.perf_counter() - begun > PATIENT_SECONDS
            if late or sum(each.neighbours <= QUIET for each in done) >= rounds:
                break
            one = _round(draw.sample(given, len(given)), f"round {number + 1}" if number >= 0 else "warm-up", progress)
            if number >= 0:
                done.append(one)
    return _collect(done, rounds)


@dataclass(frozen=True)
class _Round:
    measured: list[tuple[str, Measured]]
    neighbours: float


def _round(order: Sequence[Variant], what: str, progress: RoundProgress) -> _Round:
    """Run every variant once."""
    before = usage()
    measured = []
    for variant in order:
        progress.step(f"{variant.name}, {what}")
        measured.append((variant.name, _run(variant)))
    return _Round(measured, neighbours_share(before, usage()))


def _collect(done: Sequence[_Round], rounds: int) -> Samples:
    """Return the quietest rounds, in the order in which they were run."""
    quietest = sorted(range(len(done)), key=lambda index: max(QUIET, done[index].neighbours))
    kept = set(quietest[:rounds])
    samples = Samples(disturbed=len(done) - len(kept))
    for index in sorted(kept):
        one = done[index]
        samples.orders.append([name for name, _ in one.measured])
        samples.neighbours.append(one.neighbours)
        for name, measured in one.measured:
            samples.add(name, measured)
    return samples


def _run(variant: Variant) -> Measured:
    if variant.prepare is not None:
        variant.prepare()
    return variant.run()


def _check(variants: Sequence[Variant], rounds: int, warmup: int) -> None:
    names = [variant.name for variant in variants]
    if not names:
        raise ValueError("there is nothing to measure")
    if len(set(names)) != len(names):
        raise ValueError(f"variants must have different names, and these do not: {', '.join(names)}")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"{rounds} rounds after {warmup} of warm-up cannot be run; ask for at least one round")
