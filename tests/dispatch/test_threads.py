"""Threads share a dispatched model within budgets that were given: peaks are measured, outputs are right."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, make_plan, undispatch
from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import DispatchError
from bigmodel.plan import Plan
from bigmodel.plan.result.forwards import forwards_at_once, further_bytes
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly

from ..examples import alike
from .mixtures import mixtral
from .models import Stack, ids, llama, stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("accelerators")]

THREADS, CONTEXT, NEW = 4, 64, 2
MOMENT, LONG = 0.05, 30.0
"""Seconds for which calls wait for one another: where they need not come, and where they do."""


def half_streamed(model: nn.Module, forwards: int = 1, **planned: Any) -> Plan:
    """Return a plan by which half of the model is streamed, with a budget for exactly so many forwards at once."""
    whole = make_plan(model, {0: "1GB", "cpu": "1GB"}, context_length=CONTEXT, **planned).devices[0]
    plan = make_plan(model, {0: whole.total - whole.weights // 2, "cpu": "1GB"}, context_length=CONTEXT, **planned)
    device = plan.devices[0]
    exact = replace(device, budget=device.total + (forwards - 1) * further_bytes(plan, device))
    plan = replace(plan, devices={**plan.devices, 0: exact})
    assert plan.streamed
    assert forwards_at_once(plan) == forwards
    return plan


def budget_of(plan: Plan) -> int:
    budget = plan.devices[0].budget
    assert budget is not None
    return budget


def prompts(tokens: int = CONTEXT) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(64, (1, tokens), generator=generator) for _ in range(THREADS)]


class Together:
    """Has calls of a module wait until so many have come to its end; tells how many were there at once."""

    def __init__(self, module: nn.Module, wanted: int = THREADS, seconds: float = MOMENT) -> None:
        self._wanted, self._seconds = wanted, seconds
        self._came = self._now = self.most = 0
        self._changed = threading.Condition()
        module.register_forward_hook(self._wait)

    def _wait(self, *_: object) -> None:
        with self._changed:
            self._came += 1
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._came >= self._wanted, timeout=self._seconds)
            self._now -= 1


def in_threads(call: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Return what each call returned or raised, all of them begun at once in threads of their own."""
    barrier = threading.Barrier(len(inputs))
    results: list[Any] = [None] * len(inputs)

    def run(number: int) -> None:
        barrier.wait(timeout=60)
        try:
            with torch.no_grad():
                results[number] = call(inputs[number])
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


def last_scores(model: Any, each: torch.Tensor) -> Any:
    """Call the model for logits alone: keys and values that it returned would be the caller's, beside the next call."""
    return model(each, logits_to_keep=1, use_cache=False).logits


def generated(model: Any, each: torch.Tensor, **more: Any) -> Any:
    return model.generate(each, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **more)


def resident(model: nn.Module, call: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The slow, obvious twin: the whole model on the accelerator, one call after another."""
    plain = copy.deepcopy(model).to("virtual:0")
    with torch.no_grad():
        return [call(plain, each.to("virtual:0")).cpu() for each in inputs]


def equal(found: list[Any], wanted: list[torch.Tensor]) -> bool:
    return all(isinstance(ours, torch.Tensor) and torch.equal(ours.cpu(), each) for ours, each in zip(found, wanted))


@alike(
    ("make", "offload_buffers", "call"),
    [
        (llama, False, generated),
        (mixtral, True, last_scores),
        (llama, False, last_scores),
        (mixtral, True, generated),
    ],
    first=1,
)
def test_calls_at_once_keep_to_a_budget_for_one(
    make: Callable[[], Any], offload_buffers: bool, call: Callable[..., Any]
) -> None:
    model, inputs = make(), prompts(CONTEXT - NEW)
    wanted = resident(model, call, inputs)
    plan = half_streamed(model, offload_buffers=offload_buffers, new_tokens=NEW)
    dispatch_model(model, plan)
    Together(model.model.layers[-1])
    reset_peak_memory(0)
    found = in_threads(partial(call, model), inputs)
    assert equal(found, wanted), found
    assert max_memory_allocated(0) <= budget_of(plan)


@alike("call", [last_scores, generated], first=1)
def test_as_many_run_at_once_as_the_budget_has_room_for(call: Callable[..., Any]) -> None:
    model, inputs = llama(), prompts(CONTEXT - NEW)
    wanted = resident(model, call, inputs)
    plan = half_streamed(model, forwards=3, new_tokens=NEW)
    dispatch_model(model, plan)
    together = Together(model.model.layers[-1], wanted=3, seconds=LONG)
    reset_peak_memory(0)
    found = in_threads(partial(call, model), inputs)
    assert equal(found, wanted), found
    assert together.most == 3
    assert max_memory_allocated(0) <= budget_of(plan)


def test_calls_beyond_the_plan_run_alone() -> None:
    model, inputs = llama(), prompts()
    wanted = resident(model, lambda plain, each: plain(each, labels=each).loss, inputs)
    whole = half_streamed(model, forwards=3)
    dispatch_model(model, whole)
    together = Together(model.model.layers[-1])
    reset_peak_memory(0)
    for _ in range(2):  # the second time, one like them has fitted
        found = in_threads(lambda each: model(each, labels=each).loss, inputs)
        assert equal(found, wanted), found
    assert together.most == 1
    assert max_memory_allocated(0) <= budget_of(whole)


def test_a_generation_that_may_be_larger_than_planned_runs_alone() -> None:
    model, inputs = llama(), prompts(8)[:2]
    wanted = resident(model, partial(generated, num_beams=2), inputs)
    dispatch_model(model, half_streamed(model, forwards=3))
    together = Together(model.model.layers[-1])
    assert equal(in_threads(partial(generated, model, num_beams=2), inputs), wanted)
    assert together.most == 1


def test_a_part_that_is_called_by_itself_waits_too() -> None:
    model, inputs = llama(), prompts()

    def states(model: Any, each: torch.Tensor) -> Any:
        return model.model(each, use_cache=False).last_hidden_state

    wanted = resident(model, states, inputs)
    plan = half_streamed(model)
    dispatch_model(model, plan)
    together = Together(model.model.layers[-1])
    reset_peak_memory(0)
    found = in_threads(partial(states, model), inputs)
    assert equal(found, wanted), found
    assert together.most == 1
    assert max_memory_allocated(0) <= budget_of(plan) + sum(each.nbytes for each in found), "outputs are their callers'"


def test_a_forward_within_a_forward_is_never_held_and_one_that_fails_holds_nothing() -> None:
    model, inputs = llama(), prompts()
    wanted = resident(model, last_scores, inputs)
    dispatch_model(model, half_streamed(model))
    calls = 0

    def call_again(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert torch.equal(last_scores(model, inputs[0]), wanted[0])
        elif calls == 3:
            raise ValueError("asked to fail")

    model.model.layers[0].register_forward_hook(call_again)
    found = in_threads(partial(last_scores, model), inputs)
    right = [number for number, each in enumerate(found) if not isinstance(each, ValueError)]
    assert len(right) == THREADS - 1
    assert equal([found[number] for number in right], [wanted[number] for number in right])


def test_calls_that_record_gradients_wait_for_nothing() -> None:
    model, inputs = llama(), prompts()
    dispatch_model(model, half_streamed(model))
    together = Together(model.model.layers[-1], wanted=2, seconds=LONG)

    def train(each: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return model(each).logits.sum()

    in_threads(train, inputs[:2])
    assert together.most == 2


def test_a_model_that_others_wait_for_is_not_undispatched() -> None:
    model, inputs = llama(), prompts(8)
    dispatch_model(model, half_streamed(model))
    found = dispatched(model)
    assert found is not None
    assert found.admission is not None
    admission = found.admission
    refused: list[bool] = []

    def undispatch_between_forwards(*_: object) -> bool:
        if refused:
            return False
        while not admission.waiting:
            time.sleep(0.001)
        try:
            undispatch(model)
        except DispatchError:
            refused.append(True)
        return False

    wanted = resident(llama(), generated, inputs[:2])
    criteria = [undispatch_between_forwards]
    found_now = in_threads(lambda each: generated(model, each, stopping_criteria=criteria), inputs[:2])
    assert equal(found_now, wanted), found_now
    assert refused
    undispatch(model)
    assert "generate" not in model.__dict__


def test_nothing_waits_where_no_budget_was_given() -> None:
    found = dispatched(dispatch_model(stack(), {"": 0, "blocks": "cpu"}))
    assert found is not None
    assert found.admission is None


def test_a_model_that_needs_no_attachment_has_none() -> None:
    model: Stack = dispatch_model(stack(), make_plan(stack(), {0: "1GB"}, sample_inputs=ids()))  # type: ignore[assignment]
    assert "forward" not in model.__dict__
