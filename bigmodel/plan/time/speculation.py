"""Predicted seconds of passes over more tokens than one of each sequence, in which proposed tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...profile.trace.work import ATTENTION, CONVOLUTION, POINTWISE, PRODUCT, Work
from ..memory.assignment import STEP, Assignment
from ..result.budgets import Key
from ..result.speculation import Speculation
from .cost import CostModel, StepTime
from .unit_cost import UnitCost

_BY_ROWS = (PRODUCT, ATTENTION, CONVOLUTION, POINTWISE)


def predict_speculation(cost: CostModel, assignment: Assignment, most: int) -> Speculation | None:
    """Return the predicted seconds of passes in which up to `most` proposed tokens of each sequence are verified.

    None for a model that generates nothing. The passes are those of one sequence up to the planned batch.
    """
    phases = cost.profile.phases
    if not most or not phases or phases[-1].name != STEP:
        return None
    batch = cost.profile.workload.batch_size
    numbers = {*range(1, most + 2), *(2**power for power in range(16) if 2**power <= batch), batch, batch * (1 + most)}
    return Speculation(most, tuple((tokens, seconds_over(cost, assignment, tokens)) for tokens in sorted(numbers)))


def seconds_over(cost: CostModel, assignment: Assignment, tokens: int) -> float:
    """Return the seconds of a pass of generation over so many tokens, of all sequences together."""
    return pass_over(cost, assignment, tokens).seconds


def pass_over(cost: CostModel, assignment: Assignment, tokens: int) -> StepTime:
    """Return the time of a pass of generation over so many tokens, of all sequences together."""
    wider = CostModel(cost.profile, cost.units.machine)
    wider.units = _WiderUnits(cost, tokens / cost.profile.workload.batch_size)
    # Parts that the host computes in smaller calls only are streamed in this one.
    below = {unit: least for unit, least in assignment.computed_below.items() if tokens < least}
    return wider.seconds(len(cost.profile.phases) - 1, replace(assignment, computed_below=below))


def forward_over(cost: CostModel, assignment: Assignment, rows: int) -> StepTime:
    """Return the time of the first phase of a profile over so many rows."""
    wider = CostModel(cost.profile, cost.units.machine)
    wider.units = _WiderUnits(cost, rows / cost.profile.workload.batch_size, 0)
    return wider.seconds(0, assignment)


class _WiderUnits(UnitCost):
    """Seconds of units in a phase, the last one, of so many times the tokens: with more rows, and more experts chosen.

    Bytes that are only moved count as they are: those of weights and of keys and values do not grow with the tokens,
    and those of activations are few beside them.
    """

    def __init__(self, cost: CostModel, times: float, phase: int = -1) -> None:
        super().__init__(cost.profile, cost.units.machine)
        self._phase = phase % len(cost.profile.phases)
        # By `id` of works, which layers of one kind share: those themselves, so that they live on, and the wider ones.
        self._known_rows: dict[int, tuple[Sequence[Work], list[Work]]] = {}
        for works in (self.works, self._works_from_host, self._works_packed):
            of_phase = works[phase]
            if of_phase is not None:
                works[phase] = {unit: self._wider(of_unit, times) for unit, of_unit in of_phase.items()}
        chosen = self.choices[phase]
        self._more = {
            unit: {
                position: replace(choice, tokens=max(1, round(choice.tokens * times)))
                for position, choice in positions.items()
            }
            for unit, positions in chosen.items()
        }
        self._fewer, self.choices[phase] = chosen, self._more

    def _wider(self, works: Sequence[Work], times: float) -> list[Work]:
        if id(works) not in self._known_rows:
            wider = [replace(work, rows=max(1, work.rows * times)) if work.kind in _BY_ROWS else work for work in works]
            self._known_rows[id(works)] = works, wider
        return self._known_rows[id(works)][1]

    def compute(self, phase: int, unit: int, execution: Key, from_host: bool = False, packed: bool = False) -> float:
        """As `UnitCost.compute`, with the products of further experts."""
        seconds = super().compute(phase, unit, execution, from_host, packed)
        if phase != self._phase:
            return seconds
        for position, choice in self._more.get(unit, {}).items():
            further = choice.wanted - self._fewer[unit][position].wanted
            seconds += further * self.expert_seconds(phase, unit, position, execution)
        return max(seconds, 0.0)
