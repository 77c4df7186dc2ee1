"""Named variants, measured in rounds: each round runs every variant once, in an order drawn anew.

A machine drifts: its clock, its disk, its neighbours. Variants measured one after the other are compared under
different conditions, and a fixed order flatters whoever runs last. Interleaved in random order they share the drift.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .progress import Progress
from .summary import Summary, ratio, summarise

Measured: TypeAlias = "float | Mapping[str, float]"
"""Seconds, or several named figures."""

SECONDS = "seconds"


@dataclass(frozen=True)
class Variant:
    """One way of doing what is compared.

    Attributes:
        name: What it is called in the table.
        run: Does the work once and returns what it measured.
        prepare: Done before each run, unmeasured: dropping caches, say.
    """

    name: str
    run: Callable[[], Measured]
    prepare: Callable[[], object] | None = None


@dataclass
class Samples:
    """What each variant measured, round by round.

    Attributes:
        values: By variant and by figure, one value for each round.
        orders: The order in which the variants ran, for each round.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)

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
        """Append what one run measured."""
        figures = {SECONDS: float(measured)} if isinstance(measured, (int, float)) else dict(measured)
        kept = self.values.setdefault(variant, {})
        for name, value in figures.items():
            kept.setdefault(name, []).append(float(value))


def measure(variants: Iterable[Variant], rounds: int, warmup: int = 1, seed: int = 0) -> Samples:
    """Measure `variants` in `rounds` rounds, after `warmup` rounds whose figures are thrown away.

    Args:
        variants: What is compared; names must differ.
        rounds: How many values each gets; at least one.
        warmup: Rounds before that.
        seed: Of the orders.

    Raises:
        ValueError: No variants, two of the same name, or no rounds.
    """
    given = list(variants)
    _check(given, rounds, warmup)
    draw = random.Random(seed)
    samples = Samples()
    with Progress(len(given) * (rounds + warmup)) as progress:
        for number in range(-warmup, rounds):
            order = draw.sample(given, len(given))
            if number >= 0:
                samples.orders.append([variant.name for variant in order])
            for variant in order:
                progress.step(f"{variant.name}, {'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}")
                measured = _run(variant)
                if number >= 0:
                    samples.add(variant.name, measured)
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
