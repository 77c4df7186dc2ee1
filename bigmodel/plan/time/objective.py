"""What a plan is to make least: seconds of a step, or of a whole job."""

from __future__ import annotations

from collections.abc import Mapping

from ..memory.assignment import Assignment
from .cost import CostModel, StepTime

PROMPT_SHARE = 1e-3
"""How much a second of the prompt counts beside one of a step where steps are what matters: ties are broken by it."""

UNKNOWN_NEW_TOKENS = 128
"""New tokens of a job of which nothing is said."""


class Objective:
    """Seconds of an assignment, weighed.

    Args:
        cost: predicts seconds.
        name: "latency" (a step), "throughput" (prompt and all steps); "fit" is weighed like "latency".
    """

    def __init__(self, cost: CostModel, name: str = "latency") -> None:
        self.cost = cost
        self.name = name
        self.weights = self._weights()

    def _weights(self) -> Mapping[int, float]:
        """Return how often, or how much, each phase counts."""
        phases = self.cost.profile.phases
        if len(phases) == 1:
            return {0: 1.0}
        if self.name == "throughput":
            asked = self.cost.profile.workload.new_tokens
            return {0: 1.0, 1: float(UNKNOWN_NEW_TOKENS if asked is None else max(asked - 1, 1))}
        return {0: PROMPT_SHARE, 1: 1.0}

    def seconds(self, assignment: Assignment) -> float:
        """Return what is to be made least."""
        return sum(
            weight * self.cost.seconds(phase, assignment).seconds for phase, weight in self.weights.items() if weight
        )

    def steps(self, assignment: Assignment) -> list[StepTime]:
        """Return the time of one pass of each phase."""
        return [self.cost.seconds(phase, assignment) for phase in range(len(self.cost.profile.phases))]
