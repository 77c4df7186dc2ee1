"""The guard of a model with unknown activations: its first forward measures them, then the model is placed again.

Memory is planned from a dry run on fake tensors. A model whose forward cannot run so, and for which no sample inputs
were given, is planned as cautiously as can be (`Plan.guarded`): every part that can be is streamed, through a single
slot. The first forward then runs under this guard:

1. One thread runs it, and others that call the model meanwhile wait. An exception leaves everything as it was: the
   forward after it is the first.
2. Whenever a block ends, the peaks of the accelerators are read. If activations and what is resident have passed a
   budget, nothing is left that could be moved away, and the forward ends in a `BudgetError` that says by how much.
3. When it ends, the model is planned with what was measured, and placed by that plan. The guard is gone; threads that
   waited run by the new placement. Since blocks only become resident, in memory that is known to be free, no budget is
   passed on the way.

Weights must stay the objects they are where a backward is to come or an optimizer holds them. If the first forward has
gradients, or an optimizer exists, the model stays as it is, streamed, and its plan alone is corrected.

Peaks are those of the device's allocator, which knows libraries' workspace too, and whatever else allocates there at
the same time. Its recorded peak is reset once, when the first forward begins.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...devices import (
    PeakMeter,
    accelerators,
    format_size,
    is_accelerator,
    memory_allocated,
    normalize_device,
    torch_device,
)
from ...devices.forks import new_rlock
from ...devices.nested import tensors_in
from ...errors import BudgetError, DispatchError
from ...plan import Plan
from ...profile import storage_key
from ...profile.trace.measured import MeasuredForward
from ..placement.measured import corrected_plan, plan_measured
from ..streaming.gradients import Compute
from .attached_forward import AttachedForward
from .dispatched import Dispatched

logger = logging.getLogger(__name__)

Place = Callable[[nn.Module, Plan], None]
"""Dispatches a dispatched model again, by a new plan."""

CALL = "_call_impl"
"""The method behind a module's call, which runs its hooks and its forward."""


class ActivationGuard:
    """Guards the calls of one dispatched model until one of them has been measured.

    Args:
        model: The model.
        result: Its record, with a plan that is `Plan.guarded`.
        place: Places the model by a new plan.
    """

    def __init__(self, model: nn.Module, result: Dispatched, place: Place) -> None:
        self._model = model
        self._result = result
        self._place = place
        self._lock = new_rlock()
        self._measuring: _Measuring | None = None
        self._replaced: list[tuple[AttachedForward, Compute | None]] = []

    def attach(self) -> None:
        """Guard the model's forward and its other methods, and follow its blocks."""
        for name, forward in self._result.attachments.items():
            if forward.blocks:
                self._replace(forward, _Block(self, name, forward.compute or forward.plain))
        root = self._result.attachments[""]
        for start in (root, *(each for each in self._result.outside if each.module is self._model)):
            self._replace(start, _Start(self, start.method, start.compute or start.plain))
        self._result.on_detach = self.detach
        self._model.__dict__[CALL] = self._call

    def detach(self) -> None:
        """Guard and follow no more."""
        self._follow_no_more()
        self._let_pass()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: while it is placed again its weights are on no device in particular, so that calls of other
        threads wait here."""
        with self._lock:
            if self._replaced:
                return type(self._model)._call_impl(self._model, *args, **kwargs)
        return type(self._model)._call_impl(self._model, *args, **kwargs)

    def _let_pass(self) -> None:
        """Have threads no longer wait before they call the model."""
        if getattr(self._model.__dict__.get(CALL), "__self__", None) is self:
            del self._model.__dict__[CALL]

    def _follow_no_more(self) -> None:
        while self._replaced:
            forward, compute = self._replaced.pop()
            forward.compute = compute

    def _replace(self, forward: AttachedForward, compute: Compute) -> None:
        self._replaced.append((forward, forward.compute))
        forward.compute = compute

    def run(self, start: _Start, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call of the model: measured, or by the placement that another thread's has led to meanwhile."""
        with self._lock:
            if self._measuring is not None:  # the model calls itself
                return start.compute(args, kwargs)
            if self._replaced:
                return self._run_measured(start.compute, args, kwargs)
        return getattr(self._model, start.method)(*args, **kwargs)

    def _run_measured(self, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._measuring = _Measuring(self._result.plan, args, kwargs)
        try:
            output = compute(args, kwargs)
            measured = self._measuring.end(output)
        finally:
            self._measuring = None
        trained = (*self._model.parameters(), *tensors_in((args, kwargs), set()))
        needs_gradients = any(tensor.requires_grad for tensor in trained)
        self._correct(measured, stays=needs_gradients and (torch.is_grad_enabled() or _is_optimized(self._model)))
        return output

    def block_ended(self, name: str) -> None:
        """Read the peaks after a block; raise BudgetError if one has passed its budget."""
        if self._measuring is not None:
            self._measuring.block_ended(name)

    def _correct(self, measured: MeasuredForward, stays: bool) -> None:
        """Place the model by what was measured; where its weights must stay, correct its plan alone."""
        result = self._result
        try:
            result.refuse_while_running()
        except DispatchError:  # another thread calls a part of the model by itself: the next forward is measured
            return
        self._follow_no_more()
        result.on_detach = None  # others wait until it is placed
        try:
            what = self._place_by(measured, stays)
        finally:
            self._let_pass()
        logger.warning(
            "%s: activations took %s in its first forward; %s", result.plan.model, format_size(measured.peak), what
        )

    def _place_by(self, measured: MeasuredForward, stays: bool) -> str:
        """Place the model by what was measured, or correct its plan alone if it `stays`; return what was done."""
        result = self._result
        if stays:
            result.resolved = replace(result.resolved, plan=corrected_plan(result.plan, measured))
            return (
                "its weights stay streamed, as gradients were on or an optimizer holds them: to have them placed, "
                "dispatch it again and run it first under torch.no_grad(), or give sample_inputs"
            )
        plan = plan_measured(self._model, result.resolved, measured)
        self._place(self._model, plan)
        resident = sum(is_accelerator(part.device) for part in plan.parts)
        return f"{resident} of {len(plan.parts)} parts are resident on accelerators now"


def _is_optimized(model: nn.Module) -> bool:
    """Whether an optimizer holds parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return any(id(parameter) in own for group in groups for parameter in group["params"])


class _Measuring:
    """One first forward: its peaks so far, which must keep to the budgets of the plan.

    Args:
        plan: The guarded plan.
        args: Positional arguments of the forward, on the main device.
        kwargs: Keyword arguments of the forward.
    """

    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._plan = plan
        main = torch_device(plan.main_device)
        given = {storage_key(each): each.nbytes for each in tensors_in((args, kwargs), set()) if each.device == main}
        self._given = set(given)
        self._inputs = {plan.main_device: sum(given.values())}
        self._before = memory_allocated(main) if is_accelerator(plan.main_device) else 0
        present = accelerators()
        keys = [key for key in plan.devices if is_accelerator(key) and normalize_device(key) in present]
        self._meters = {key: PeakMeter(key) for key in keys}
        self._ended: dict[str, None] = {}

    def block_ended(self, name: str) -> None:
        """Check the peaks after a block."""
        self._ended[name] = None
        self._peak(f"when {name!r} had run")

    def end(self, output: Any) -> MeasuredForward:
        """Return what was measured, now that the forward has ended with `output`."""
        return MeasuredForward(self._peak("when it ended") + self._kept(output), tuple(self._ended))

    def _kept(self, output: Any) -> int:
        """Return the bytes that modules keep on the main device, beside which the next forward runs."""
        if not is_accelerator(self._plan.main_device):
            return 0
        main = torch_device(self._plan.main_device)
        returned = {
            storage_key(each): each.untyped_storage().nbytes()
            for each in tensors_in(output, set())
            if each.device == main and storage_key(each) not in self._given
        }
        return max(memory_allocated(main) - self._before - sum(returned.values()), 0)

    def _peak(self, when: str) -> int:
        """Return the peak of activations so far, inputs included, on the main device.

        Raises:
            BudgetError: A device has passed its budget.
        """
        found = {key: meter.grown() + self._inputs.get(key, 0) for key, meter in self._meters.items()}
        for key, activations in found.items():
            planned = self._plan.devices[key]
            taken = planned.total + activations
            if planned.budget is not None and taken > planned.budget:
                raise BudgetError(
                    f"the first forward of {self._plan.model} passes the budget of device {key!r} by "
                    f"{format_size(taken - planned.budget)} {when}: activations took {format_size(activations)} beside "
                    f"{format_size(planned.total)} that cannot be moved away, of {format_size(planned.budget)}. Give "
                    "that device a larger budget in max_memory, or smaller inputs"
                )
        return found[self._plan.main_device]


class _Block:
    """Computes a block, and has the guard read the peaks after it."""

    def __init__(self, guard: ActivationGuard, name: str, compute: Compute) -> None:
        self._guard, self._name, self._compute = guard, name, compute

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._compute(args, kwargs)
        self._guard.block_ended(self._name)
        return output


class _Start:
    """Computes a call of the model, its forward or another method, under the guard."""

    def __init__(self, guard: ActivationGuard, method: str, compute: Compute) -> None:
        self._guard, self.method, self.compute = guard, method, compute

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._guard.run(self, args, kwargs)
