"""`ResidentStages`: how many steps of a server are worth being in flight where layers are resident on several devices.

This is the one place that decides it; `bigmodel.dispatch.transfer.stages` has the steps in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .budgets import Key, is_accelerator

if TYPE_CHECKING:
    from .plan import Part, Plan

STAGES = "stages"
"""Its name among the counters of `dispatch_stats`."""

WORTHWHILE = 1.1
"""Steps in flight must be predicted to make tokens come so many times as fast: predictions err by about a tenth."""

AS_GOOD = 0.95
"""Steps in flight that are predicted to be so nearly as fast as fewer are worth it: while the host samples and launches
one, the others keep all devices busy, which is not predicted."""


@dataclass(frozen=True)
class ResidentStages:
    """Predicted seconds of the stages of a step, by which the sequences of a server are divided among steps in flight.

    One step at a time leaves all devices but one idle. Of several, each with a part of the sequences, as many compute
    as there are devices. That is faster as far as a step of fewer tokens takes less time: where devices compute, and
    not where they only read their weights, or wait for the host to launch operations.

    Attributes:
        devices: keys of the devices, in the order in which a step first comes to them.
        seconds: number of tokens of a step, and its predicted seconds on each of the devices; in rising numbers.
        launch: seconds in which the host launches a step.
    """

    devices: tuple[Key, ...]
    seconds: tuple[tuple[int, tuple[float, ...]], ...]
    launch: float

    @property
    def most(self) -> int:
        """Steps in flight at most: two on each device. One is computed while the other waits, for the first or for the
        host to sample and launch: with one on each, devices would idle meanwhile."""
        return 2 * len(self.devices)

    def step_seconds(self, tokens: float) -> tuple[float, ...]:
        """Return the seconds of a step on each device: between the predicted ones, and beyond them, in proportion."""
        numbers = [number for number, _ in self.seconds]
        right = min(max(bisect_left(numbers, tokens), 1), len(numbers) - 1)
        (one, least), (other, most) = self.seconds[right - 1], self.seconds[right]
        share = (tokens - one) / (other - one)
        return tuple(low + (high - low) * share for low, high in zip(least, most, strict=True))

    def turn_seconds(self, tokens: int, steps: int) -> float:
        """Return the seconds in which at most so many steps in flight compute `tokens` together, one after another.

        They have as many tokens each, but for the last one, which may have fewer.
        """
        size = -(-tokens // steps)
        each = self.step_seconds(size)
        if size == tokens:
            return max(self.launch, sum(each))
        whole, rest = divmod(tokens, size)
        last = self.step_seconds(rest) if rest else (0.0,) * len(each)
        busy = max(whole * of_each + of_last for of_each, of_last in zip(each, last, strict=True))
        return max((whole + bool(rest)) * self.launch, busy, sum(each) + self.launch)

    def gain(self, tokens: int, steps: int) -> float:
        """Return how many times as fast `tokens` come with so many steps in flight as with one."""
        return self.turn_seconds(tokens, 1) / self.turn_seconds(tokens, steps)

    def steps(self, tokens: int) -> int:
        """Return the number of steps in flight with which `tokens` come fastest, or of several as good as that the
        largest; 1, unless they come `WORTHWHILE` times as fast."""
        gains = {steps: self.gain(tokens, steps) for steps in range(1, min(self.most, max(tokens, 1)) + 1)}
        best = max(gains.values())
        return max(steps for steps, gain in gains.items() if gain >= AS_GOOD * best) if best >= WORTHWHILE else 1

    def least_tokens(self) -> int | None:
        """Return the least number of tokens for which several steps in flight are worth it; None: never."""
        return next((tokens for tokens, _ in self.seconds if self.steps(tokens) > 1), None)

    def describe(self) -> str:
        """Return a sentence about a server's steps."""
        where = ", ".join(map(str, self.devices))
        least = self.least_tokens()
        if least is None:
            return f"stages: one step of a server at a time on devices {where}: several are predicted to be no faster"
        most = self.seconds[-1][0]
        return (
            f"stages: a server has up to {self.most} steps in flight on devices {where}, from {least} tokens on; "
            f"{most} tokens come {self.gain(most, self.steps(most)):.2f} times as fast as in one step at a time"
        )


def stage_runs(plan: Plan) -> list[tuple[Key, tuple[str, ...]]]:
    """Return the stages of a plan: the device of each, and the names of its parts; none, unless every part is resident
    on one of several accelerators."""
    runs = list(_runs(plan.parts))
    several = len({device for device, _ in runs}) > 1
    return runs if several and whole_step_resident(plan.parts) else []


def whole_step_resident(parts: tuple[Part, ...]) -> bool:
    """Whether every part is resident on an accelerator, its keys and values included."""
    return all(is_accelerator(part.device) and part.device == part.runs_on and not part.kv_on_host for part in parts)


def _runs(parts: tuple[Part, ...]) -> Iterator[tuple[Key, tuple[str, ...]]]:
    for device, run in groupby(parts, key=lambda part: part.runs_on):
        yield device, tuple(part.name for part in run)
