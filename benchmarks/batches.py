"""Does the batch that a plan for throughput chooses generate as many tokens per second as the best fixed one?

Five budgets for one model, most of which do not hold it. For each the plan chooses a batch; every power of two that
fits is planned, too, and all run in the same rounds: a prompt and its steps for the whole batch. A plan that is equal
to another one is measured once. As in `per_pass`, the
speeds of devices and link are simulated, so that a batch costs what it would on an accelerator.

An accelerator computes beside the program that launches its operations, but a virtual one that has a link of a set
speed does not: what it really computes comes on top of launching. So the seconds of launching are simulated, too, and
are more than both take here; what a batch really computes is hidden behind them, or behind what it is simulated to
compute.

Beside them, in the same rounds, accelerate generates the chosen batch by its own device map: with as much room for
weights as keeps the budget, which it does not do by itself (see `maps`); where no room does it has no figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.report import Cell
from .models import quiet
from .peers import streamed_by_accelerate
from .per_pass import JobSizes, Speed, at_set_speed, dispatched, machine_of, make, profile_of

if TYPE_CHECKING:
    from torch import nn

    from bigmodel.plan import Plan
    from bigmodel.profile import Profile
    from bigmodel.profile.machine.machine import MachineProfile

SHARES = (0.4, 0.7, 1.0, 1.4, 2.0)
"""Budgets of the accelerator, as shares of the weights."""

LINK = 62.5e6
"""Bytes per second of the link to the accelerator."""

SPEEDS = {"cpu": Speed(16e-9, 6.4e-9), "virtual": Speed(8e-10, 3.2e-10)}
"""The accelerator computes twenty times as fast as the host, and no faster than the processor that simulates it."""

OPERATION = {"cpu": 4e-5, "virtual": 1e-4}
"""Simulated seconds of launching an operation; one of a single sequence takes two thirds of that here, or less."""

LARGEST = 32
"""Largest batch that is tried."""

SLOWER = 1.0
"""Tokens per second of the chosen batch over those of the best fixed one, at least."""

ERROR = 0.15

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "its plans are made for a link and an accelerator of set speeds, which only a virtual one has"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.set_defaults(device="virtual", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure the chosen batch and the fixed ones under each budget."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    virtual.enable(1, bandwidth=LINK)
    sizes = JobSizes(4, 64, 16, 2) if options.quick else JobSizes(6, 256, 16, 6)
    most = 4 if options.quick else LARGEST
    model = make(sizes)
    profile = profile_of(model, sizes)
    machine = machine_of(SPEEDS, OPERATION, LINK)
    launching = {name: seconds * _operations_of_layer(profile) for name, seconds in OPERATION.items()}
    rows: list[list[Cell]] = []
    found: dict[str, Samples] = {}
    errors: list[float] = []
    for share in SHARES[1:2] if options.quick else SHARES:
        plans = _plans(model, sizes, machine, int(share * profile.weights), most)
        same = {name: next(first for first in plans if plans[first] == plan) for name, plan in plans.items()}
        variants = [
            Variant(name, partial(_seconds, dispatched(model, plan, SPEEDS, launching), plan, sizes))
            for name, plan in plans.items()
            if same[name] == name
        ]
        chosen = plans[CHOSEN]
        device_map = _map_of_accelerate(model, chosen, sizes, int(share * profile.weights))
        if device_map:
            peer = _by_accelerate(model, device_map, launching)
            variants.append(Variant(ACCELERATE, partial(_seconds, peer, chosen, sizes)))
        samples = measure(variants, options.rounds, seed=options.seed)
        own = [_row(share, name, plan, _rate(same[name], plan, samples)) for name, plan in plans.items()]
        errors += [abs(float(row[5] or 0) / float(row[4] or 1) - 1) for row in own]
        rate = _rate(ACCELERATE, chosen, samples) if device_map else None
        streamed = list(device_map.values()).count("cpu") if device_map else None
        rows += [*own, [share, ACCELERATE, chosen.batch_size, streamed, rate, None]]
        found[f"{share:g} of the weights"] = samples
    return _report(options, sizes, rows, errors, found)


def _operations_of_layer(profile: Profile) -> int:
    """Return the number of operations of the first layer in a step."""
    unit = next(at for at, unit in enumerate(profile.units) if unit.name == "model.layers.0")
    return len(profile.phases[-1].trace.work()[unit])


CHOSEN, ACCELERATE = "chosen", "accelerate, the chosen batch"


def _plans(model: nn.Module, sizes: JobSizes, machine: MachineProfile, budget: int, most: int) -> dict[str, Plan]:
    """Return the plan of the chosen batch, and those of fixed ones that fit, by name."""
    from bigmodel.errors import BudgetError
    from bigmodel.plan.search.batch import best_batch

    plan_at = partial(_plan_at, model, sizes, machine, budget)
    plans = {CHOSEN: best_batch(plan_at, most)}
    size = 1
    while size <= most:
        try:
            plans[f"fixed: {size}"] = plan_at(size)
        except BudgetError:
            break
        size *= 2
    return plans


def _plan_at(model: nn.Module, sizes: JobSizes, machine: MachineProfile, budget: int, batch_size: int) -> Plan:
    from bigmodel.plan import plan

    return plan(
        model,
        {0: budget, "cpu": 2**34},
        objective="throughput",
        batch_size=batch_size,
        context_length=sizes.prompt + sizes.steps,
        new_tokens=sizes.steps,
        machine=machine,
        padded=False,
    )


def _seconds(model: Any, plan: Plan, sizes: JobSizes) -> float:
    """Return the seconds of a prompt and its steps, for the whole batch."""
    import torch

    from bigmodel.devices import torch_device

    device = torch_device(plan.main_device)
    ids = torch.arange(sizes.prompt).expand(plan.batch_size, -1).to(device)
    token = torch.ones(plan.batch_size, 1, dtype=torch.long, device=device)

    def job() -> None:
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(sizes.steps - 1):
            model(token, past_key_values=cache, use_cache=True)

    with torch.inference_mode():
        return elapsed(job, "virtual:0")


def _map_of_accelerate(model: Any, plan: Plan, sizes: JobSizes, budget: int) -> dict[str, Any] | None:
    """Return the device map of accelerate with the most room for weights at which the batch of `plan` keeps the budget;
    None if there is none."""
    import copy

    from accelerate import infer_auto_device_map

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual

    quiet()
    room = budget
    virtual.configure(0)  # the map is found without waiting for the link
    try:
        while room > 0:
            device_map = dict(infer_auto_device_map(model, {0: room, "cpu": 2**36}, model._no_split_modules))
            before = memory_allocated(0)
            placed = streamed_by_accelerate(copy.deepcopy(model), "virtual:0", device_map)
            reset_peak_memory(0)
            _seconds(placed, plan, sizes)
            beyond = max_memory_allocated(0) - before - budget
            if beyond <= 0:
                return device_map
            room -= max(beyond, budget // 100)
    finally:
        virtual.configure(0, bandwidth=LINK)
    return None


def _by_accelerate(model: Any, device_map: dict[str, Any], launching: Mapping[str, float]) -> Any:
    """Return a copy of `model` streamed by accelerate, whose layers take the simulated time of their device."""
    import copy

    placed = copy.deepcopy(model)
    for layer in placed.model.layers:
        at_set_speed(layer, SPEEDS, launching)
    return streamed_by_accelerate(placed, "virtual:0", device_map)


def _row(share: float, name: str, plan: Plan, rate: float) -> list[Cell]:
    return [share, name, plan.batch_size, len(plan.streamed), rate, plan.tokens_per_second]


def _rate(name: str, plan: Plan, samples: Samples) -> float:
    return plan.batch_size * (plan.new_tokens or 1) / samples.median(name)


def _report(
    options: argparse.Namespace,
    sizes: JobSizes,
    rows: list[list[Cell]],
    errors: list[float],
    found: dict[str, Samples],
) -> Report:
    """Return the table, and the limits: the chosen batch is never slower, and tokens per second are as predicted."""
    columns = [Column("budget over weights", "ratio"), Column("batch"), Column("sequences", "count")]
    columns += [Column("streamed parts", "count"), Column("tokens per second"), Column("predicted")]
    ratios = []
    for share in {row[0] for row in rows}:
        rates = {str(row[1]): float(row[4] or 0) for row in rows if row[0] == share}
        ratios.append(rates[CHOSEN] / max(rate for name, rate in rates.items() if name.startswith("fixed")))
    return Report(
        "batches",
        options.device,
        settings={
            **vars(sizes),
            "link": LINK,
            "speeds": {name: vars(speed) for name, speed in SPEEDS.items()},
            "operation": OPERATION,
        },
        tables=[
            Table(f"{sizes.layers} layers, prompts of {sizes.prompt} tokens and {sizes.steps} new ones", columns, rows)
        ],
        limits=[
            Limit("the chosen batch over the best fixed one, at the worst budget", min(ratios), ">=", SLOWER),
            Limit("the largest error of predicted tokens per second", max(errors), "<=", ERROR),
        ],
        samples=found,
    )
