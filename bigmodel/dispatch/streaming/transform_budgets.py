"""Budgets of devices in calls that no plan counts: transforms of ``torch.func``, forward-mode differentiation, and
calls of a model beyond its plan (`unplanned_calls`).

No plan counts what transforms take: `torch.vmap` computes as many inputs at once as it is given, `jvp` a tangent
beside each tensor, and `grad` keeps the copy of each streamed weight until its backward. Such a call of the model is
measured instead. Before its inputs are moved, before each operation and before each streamed block, the memory that the
call has taken and is about to take is compared with the budgets: the call ends in a `BudgetError` before it passes one.
What an operation returns is known from the same operation on meta; what a kernel takes while it runs is not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import (
    accelerators,
    format_size,
    is_accelerator,
    max_memory_allocated,
    memory_allocated,
    normalize_device,
    torch_device,
)
from ...devices.nested import iter_tensors, map_tensors, tensors_in
from ...errors import BudgetError
from ...plan import Plan
from ...plan.result.plan import DevicePlan
from ...profile import storage_key
from ..weights.block import Block
from .unplanned_calls import MeasuredCalls, Unplanned

Compute = Callable[[tuple[Any, ...], dict[str, Any]], Any]

MOST_TIMES = 2.0
"""Calls of more than so many times the size of one that was measured are measured again, whatever room it left."""


class TransformBudgets:
    """Measures the calls of one dispatched model that are transformed, or beyond its plan.

    Args:
        plan: The plan of the model.
    """

    def __init__(self, plan: Plan) -> None:
        self._model = plan.model
        present = accelerators()
        self._devices = [
            device
            for key, device in plan.devices.items()
            if is_accelerator(key) and device.budget is not None and normalize_device(key) in present
        ]
        self._running = _RunningCall()

    def run(
        self,
        compute: Compute,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unplanned: Unplanned | None = None,
    ) -> Any:
        """Return what a transformed call of the model computes, or one beyond its plan.

        Args:
            compute: The call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            unplanned: A call beyond the plan, and what is told once it has kept to the budgets: how many times as much
                as it took of them, beside what the model holds between calls, they have room for; at most `MOST_TIMES`.

        Raises:
            BudgetError: A device has passed its budget, or would.
        """
        if self._running.meters is not None:  # the model calls itself
            return compute(args, kwargs)
        given = _storages(args, kwargs)
        self._running.meters = [_Meter.begin(device, given) for device in self._devices]
        self._running.unplanned = None if unplanned is None else unplanned.calls
        try:
            with _CheckedOperations(self):
                output = compute(args, kwargs)
            self.check("when it ended")
            times = min([MOST_TIMES, *(meter.times() for meter in self._running.meters)])
        finally:
            self._running.meters = None
        if unplanned is not None:
            unplanned.calls.fits(unplanned.size, times)
        return output

    def check_inputs(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        unplanned: MeasuredCalls[Any] | None = None,
    ) -> None:
        """Raise BudgetError if there is no room for the arguments of a call to measure, which are to be moved.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            device: Where they are moved.
            unplanned: What tells calls like it; None: it is transformed.
        """
        if self._running.meters is not None:
            return
        given = _storages(args, kwargs)
        for plan in self._devices:
            meter = _Meter.begin(plan, given)
            if meter.device == device:
                arriving = sum(nbytes for lies_on, nbytes in given.values() if lies_on != device)
                self._refuse(meter, meter.fixed + arriving, "with its inputs", unplanned)

    def check(self, when: str, further: int = 0, device: torch.device | None = None) -> None:
        """Raise BudgetError if the call that the thread runs has passed a budget, or would.

        Args:
            when: For the message.
            further: Bytes that are about to be taken.
            device: On this device.
        """
        for meter in self._running.meters or ():
            taken = meter.taken(further if device == meter.device else 0)
            self._refuse(meter, taken, when, self._running.unplanned)

    def _refuse(self, meter: _Meter, taken: int, when: str, calls: MeasuredCalls[Any] | None) -> None:
        budget = meter.plan.budget
        if budget is not None and taken > budget:
            passes = f"passes the budget of device {meter.plan.device!r} by {format_size(taken - budget)} {when}"
            if calls is not None:
                raise BudgetError(
                    f"a call of {self._model} with {calls.beyond} {passes}: "
                    f"give that device a larger budget in max_memory, or give smaller inputs; {calls.advice}"
                )
            raise BudgetError(
                f"a call of {self._model} under a transform of torch.func or forward-mode differentiation {passes}: "
                "no plan counts what these take, and each operation of streamed modules copies its weights. Give that "
                "device a larger budget in max_memory, give smaller inputs (vmap: chunk_size), or plan with "
                "sample_inputs as large as all that is computed at once"
            )

    def check_before(self, block: Block, device: torch.device) -> None:
        """Raise BudgetError if there is no room for a copy of the largest weight of a block."""
        with DisableTorchFunctionSubclass():
            sizes = [tensor.value.nbytes for tensor in block.tensors if tensor.value.device != device]
        self.check(f"with a copy of the weights of {block.name!r}", max(sizes, default=0), device)


class _CheckedOperations(TorchDispatchMode):
    """Checks the budgets before each operation, with what it is about to return.

    Args:
        budgets: Checks them.
    """

    supports_higher_order_operators = True

    def __init__(self, budgets: TransformBudgets) -> None:
        super().__init__()
        self._budgets = budgets

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = _device_of(args, kwargs)
        if device is not None and is_accelerator(device):
            self._budgets.check(f"with what {func} returns", _returned_bytes(func, args, kwargs), device)
        return func(*args, **kwargs)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device on which an operation makes tensors; None for the default one."""
    devices = (tensor.device for tensor in iter_tensors((args, kwargs)) if tensor.dim())
    return kwargs.get("device") or next(devices, None)


def _returned_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the tensors that an operation makes; 0 where that is not known without computing it."""

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    if not isinstance(func, torch._ops.OpOverload) or func.is_view:
        return 0
    there = {"device": torch.device("meta")} if "device" in kwargs else {}
    given = map_tensors(on_meta, (args, {**kwargs, **there}))
    try:
        returned = func(*given[0], **given[1])
    except (NotImplementedError, RuntimeError):
        return 0
    known = {storage_key(tensor) for tensor in iter_tensors(given)}
    made = {storage_key(tensor): tensor.nbytes for tensor in iter_tensors(returned)}
    return sum(nbytes for key, nbytes in made.items() if key not in known)


class _RunningCall(threading.local):
    """The measured call of the calling thread.

    Attributes:
        meters: What measures it; None: there is none.
        unplanned: What tells calls like it, if it is beyond the plan, and not transformed.
    """

    meters: list[_Meter] | None = None
    unplanned: MeasuredCalls[Any] | None = None


@dataclass
class _Meter:
    """The memory of one device while a call runs.

    Attributes:
        plan: What is planned there.
        device: The device.
        fixed: Bytes that the model holds there between calls, and those of the call's inputs.
        before: Bytes allocated there when the call began.
        peak: The most bytes that were allocated there before the call.
        most: The most bytes of the model and the call that `taken` has returned.
    """

    plan: DevicePlan
    device: torch.device
    fixed: int
    before: int
    peak: int
    most: int = 0

    @classmethod
    def begin(cls, plan: DevicePlan, given: dict[Hashable, tuple[torch.device, int]]) -> _Meter:
        device = torch_device(plan.device)
        held = _held(plan)
        inputs = sum(nbytes for lies_on, nbytes in given.values() if lies_on == device)
        return cls(plan, device, held + inputs, memory_allocated(device), _recorded_peak(device))

    def taken(self, further: int) -> int:
        """Return the most bytes of the model and the call so far, or with `further` ones now.

        The recorded peak is not reset, as the program may read it; it tells once it has risen.
        """
        peak = _recorded_peak(self.device)
        now = memory_allocated(self.device) + further
        taken = self.fixed - self.before + max(now, peak if peak > self.peak else 0)
        self.most = max(self.most, taken)
        return taken

    def times(self) -> float:
        """Return how many times as much as the call has taken, inputs included, there is room for."""
        held, budget = _held(self.plan), self.plan.budget
        return math.inf if budget is None or self.most <= held else (budget - held) / (self.most - held)


def _held(plan: DevicePlan) -> int:
    """Return the bytes that the model holds on a device between calls."""
    return plan.weights + plan.buffers + plan.slots + plan.training + plan.unused


def _recorded_peak(device: torch.device) -> int:
    """Return the most bytes that were allocated on a device; those now if it records no peak."""
    return memory_allocated(device) if device.type == "mps" else max_memory_allocated(device)


def _storages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Hashable, tuple[torch.device, int]]:
    """Return the device and the bytes of the storages among the arguments of a transformed call, tangents included."""
    found: dict[Hashable, tuple[torch.device, int]] = {}
    for tensor in tensors_in((args, kwargs), set()):
        for plain in _plain_tensors(tensor):
            found[storage_key(plain)] = plain.device, plain.nbytes
    return found


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor consists of under transforms."""
    parts = forward_ad.unpack_dual(tensor) if forward_ad._current_level >= 0 else None
    if parts is not None and parts.tangent is not None:
        yield from _plain_tensors(parts.tangent)
    if is_functorch_wrapped_tensor(tensor):
        yield from _plain_tensors(get_unwrapped(tensor))
    else:
        yield tensor
