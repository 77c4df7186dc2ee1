"""Are missing experts divided well between the link and the host, and do steps take as long as predicted?

A mixture in host memory runs on a virtual accelerator behind links of nine speeds, around that at which the host
computes an expert. At each speed `plan` makes three plans, for ``offload="stream"``, ``"compute"`` and ``"auto"``, by
this machine's measured speeds. Their steps are measured, and as brute force those of the streaming plan with other
divisions: by rates under which the link or the host gets more than by those that are set. Routers follow traces with
and without temporal locality (`router_traces`).

The host multiplies at a set speed, too (`host_of_speed`): as the link does, it waits without using a core. Else both
would share this machine's cores, and a virtual link, which copies for real, could be no faster than a core computes.
The faster of both needs the same seconds for an expert at each ratio, so that Python takes the same part of each step.

Plans predict the hits of the mean trace, and few steps may be far from it: each round follows another one of 32 traces,
the one nearest to their mean (`typical_trace`). How often routers choose again is known from `KNOWN` other texts, as of
a model that has run, and given to `plan` as `expert_reuse`. The machine is measured first, too, as predictions are of
its speed of this hour. A plan that is equal to another one is measured once.

Where link and host are equally fast accelerate takes part in the rounds. It fetches whole layers, so one of its steps
is measured in each.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.report import Cell
from .router_traces import LOCAL, UNIFORM, Habits, Trace, draw_trace, following, typical_trace

if TYPE_CHECKING:
    from torch import nn

    from bigmodel.plan import Plan
    from bigmodel.profile import Profile
    from bigmodel.profile.machine.machine import MachineProfile

STREAM, COMPUTE, AUTO = "stream", "compute", "auto"
ACCELERATE = "accelerate"
RATIOS = (0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""Seconds in which the link fetches an expert, over those in which the host computes it."""

DIVISIONS = {"link faster 3:1": 1 / 3, "link faster 5:3": 3 / 5, "host faster 5:3": 5 / 3, "host faster 3:1": 3.0}
"""By name: how many times its set seconds a fetch is said to take where brute force divides experts. A layer lacks four
at most, so that these are all divisions near the best one; streaming or computing all are plans of their own."""

SECONDS = 40e-3
"""Seconds in which the faster of link and host has fetched or computed an expert: a step waits for ten, while Python
takes a twelfth of that on the virtual accelerator."""

FILLING = 24
"""Steps before the measured ones, over a link without a limit and on a host without one: the cache is filled, and its
policy knows which experts are chosen often."""

KNOWN = 20
"""Texts, as long as those that are measured, whose hits show how often routers choose again."""

OTHER_SEED = 2**20
"""Added to the seeds of these."""

TRACES = {"uniform": UNIFORM, "local": LOCAL}
BEST, PURE, ERROR = 1.10, 1.02, 0.10

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "the link has nine speeds, which only a virtual one can"
"""Why it supports no others."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the mixture, how many steps are measured at once, and the seconds in which the faster of link and host
    has fetched or computed an expert."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    per_token: int
    steps: int
    seconds: float = SECONDS

    @property
    def elements(self) -> int:
        """Elements of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 4 * self.elements

    def host_seconds(self, ratio: float) -> float:
        """Return the seconds in which the host multiplies a row with an expert, where a fetch takes `ratio` of them."""
        return self.seconds / min(ratio, 1.0)

    def rate(self, ratio: float) -> float:
        """Return the bytes per second of a link that takes `ratio` times as long to fetch an expert."""
        return self.expert_bytes / (ratio * self.host_seconds(ratio))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.set_defaults(device="virtual", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure steps of each plan and each division, at each speed of the link and on each trace."""
    import torch

    from bigmodel.devices import virtual
    from bigmodel.profile import profile_model
    from bigmodel.profile.machine.machine import nominal_machine
    from bigmodel.profile.machine.probe import machine as measured_machine

    torch.set_num_threads(options.threads or 1)
    virtual.enable(count=1)
    sizes = Sizes(64, 96, 2, 8, 2, 2, SECONDS / 40) if options.quick else Sizes(256, 512, 3, 32, 4, 6)
    ratios = (1.0,) if options.quick else RATIOS
    model = make(sizes)
    # Prompts are of one token, so that the plans are those of steps.
    context = FILLING + sizes.steps
    profile = profile_model(model, context_length=context, new_tokens=context - 1, device_type="virtual")
    machine = nominal_machine() if options.quick else measured_machine(refresh=True)
    slots = _slots(profile, sizes)
    reuse = {name: _reuse(model, profile, sizes, habits, options.seed) for name, habits in TRACES.items()}
    samples: dict[str, Samples] = {}
    rows: list[list[Cell]] = []
    for ratio in ratios:
        seconds = sizes.host_seconds(ratio)
        with_speeds = with_link(with_host(machine, seconds / sizes.elements), sizes.rate(ratio))
        for name, habits in TRACES.items():
            plans = planned(profile, with_speeds, ratio, reuse[name])
            draw = partial(draw_trace, sizes.layers, sizes.experts, sizes.per_token, FILLING + sizes.steps, habits)
            traces = [typical_trace(draw, slots, FILLING, options.seed + each) for each in range(options.rounds)]
            same = {way: next(first for first in plans if plans[first] == plan) for way, plan in plans.items()}
            variants = [
                # Every variant follows the same traces in the same order, one in each round.
                Variant(way, partial(seconds_of_step, model, plan, cycle(traces), sizes, ratio))
                for way, plan in plans.items()
                if same[way] == way
            ]
            if ratio == 1.0:
                peer = partial(seconds_by_accelerate, copy.deepcopy(model), cycle(traces), sizes, ratio)
                variants.append(Variant(ACCELERATE, peer))
            # Each run warms up by itself: it fills the cache first.
            found = samples[f"{name}, {ratio:g}"] = measure(variants, options.rounds, warmup=0, seed=options.seed)
            rows.append(_row(name, ratio, plans[AUTO], same, found))
    return report(options, sizes, reuse, rows, samples)


def report(
    options: argparse.Namespace,
    sizes: Sizes,
    reuse: dict[str, float],
    rows: list[list[Cell]],
    samples: dict[str, Samples],
) -> Report:
    """Return the table, and the limits over all of its rows."""
    columns = [
        Column("routers"),
        Column("fetch over compute", "ratio"),
        *(Column(way, "seconds") for way in (STREAM, COMPUTE, AUTO)),
        Column("best division", "seconds"),
        Column("auto over it", "ratio"),
        Column("auto over the better of both", "ratio"),
        Column("auto, predicted", "seconds"),
        Column("predicted over measured", "ratio"),
        Column("accelerate, whole layers", "seconds"),
    ]
    over_best, over_pure = (max(float(row[at] or 0) for row in rows) for at in (6, 7))
    error = max(abs(float(row[9] or 0) - 1) for row in rows)
    return Report(
        "expert_split",
        options.device,
        settings={**vars(sizes), "rounds": options.rounds, **{f"reuse, {name}": each for name, each in reuse.items()}},
        tables=[Table("A step by the seconds of fetching an expert over those of computing it", columns, rows)],
        limits=[
            Limit("auto over the best division found by brute force", over_best, "<=", BEST),
            Limit("auto over the better of streaming and computing all", over_pure, "<=", PURE),
            Limit("largest error of the predicted step", error, "<=", ERROR),
        ],
        samples=samples,
    )


def _row(name: str, ratio: float, plan: Plan, same: dict[str, str], found: Samples) -> list[Cell]:
    """Return one row of the table: of `plan`, the chosen one, and of the first plan that each is `same` as."""
    step = {way: found.median(first) for way, first in same.items()}
    best = same[min(step, key=step.__getitem__)]
    pure = same[min((STREAM, COMPUTE), key=step.__getitem__)]
    prediction = plan.prediction
    assert prediction is not None
    return [
        name,
        ratio,
        *(step[way] for way in (STREAM, COMPUTE, AUTO)),
        step[best],
        found.ratio(same[AUTO], best).median,
        found.ratio(same[AUTO], pure).median,
        prediction.token,
        prediction.token / step[AUTO],
        found.median(ACCELERATE) if ACCELERATE in found.values else None,
    ]


def make(sizes: Sizes) -> nn.Module:
    """Return a mixture of these sizes with random weights, in host memory."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.per_token,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
    )
    model: nn.Module = MixtralForCausalLM(config).eval()
    return model


def with_host(machine: MachineProfile, per_element: float) -> MachineProfile:
    """Return the machine with a host that multiplies at this speed, in seconds per element of the matrix and row."""
    from bigmodel.profile.machine.machine import CACHED, Curve
    from bigmodel.profile.trace.work import PRODUCT

    host, name = machine.device("cpu"), f"{PRODUCT}:float32"
    curves = {key: curve for key, curve in host.curves.items() if key != name + CACHED}
    slower = replace(host, curves={**curves, name: Curve((1.0, 2.0), (per_element, 2 * per_element), grows=True)})
    accelerator = {"virtual:0": machine.device("virtual:0")}  # which else may be taken to be like the host
    return replace(machine, devices={**machine.devices, **accelerator, "cpu": slower})


@contextmanager
def host_of_speed(model: nn.Module, per_element: float) -> Iterator[None]:
    """Within this context products on the host take this time, in seconds per element of the matrix and row: those of
    linear layers and of experts."""
    from torch import nn
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    begun: list[float] = []
    original: Callable[..., Any] = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def wait(begin: float, elements: int) -> None:
        time.sleep(max(begin + elements * per_element - time.perf_counter(), 0.0))

    def experts(module: Any, hidden: Any, index: Any, weights: Any) -> Any:
        begin = time.perf_counter()
        output = original(module, hidden, index, weights)
        if hidden.device.type == "cpu":
            wait(begin, index.numel() * (module.gate_up_proj[0].numel() + module.down_proj[0].numel()))
        return output

    def before(_module: nn.Module, _inputs: Any) -> None:
        begun.append(time.perf_counter())

    def after(module: Any, inputs: Any, _output: Any) -> None:
        begin = begun.pop()
        if inputs[0].device.type == "cpu":
            rows = inputs[0].numel() // inputs[0].shape[-1]
            wait(begin, rows * module.in_features * module.out_features)

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(before) for module in linear]
    hooks += [module.register_forward_hook(after) for module in linear]
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = experts
    try:
        yield
    finally:
        del ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        for hook in hooks:
            hook.remove()


def with_link(machine: MachineProfile, rate: float) -> MachineProfile:
    """Return the machine with a link of `rate` bytes per second to the accelerator."""
    name = "virtual:0"
    links = machine.link(name)
    faster = replace(links, to_device=replace(links.to_device, rate=rate))
    return replace(machine, links={**machine.links, name: faster})


def _reuse(model: nn.Module, profile: Profile, sizes: Sizes, habits: Habits, seed: int) -> float:
    """Return how often routers choose again what they have chosen, by the counters of a mixture that has run."""
    import torch

    from bigmodel.dispatch import dispatch_model, undispatch
    from bigmodel.plan import plan

    from .steps import Decoder

    tokens = FILLING + sizes.steps
    trace = draw_trace(sizes.layers, sizes.experts, sizes.per_token, KNOWN * tokens, habits, OTHER_SEED + seed)
    dispatch_model(model, plan(profile, budget_of(profile)))
    try:
        with following(model, trace):
            for _ in range(KNOWN):
                decoder = Decoder(model, "virtual:0")
                decoder.feed(torch.ones(1, 1, dtype=torch.long).to(decoder.device))
                for _ in range(tokens - 1):
                    decoder.step()
        counters: dict[str, dict[str, dict[str, float]]] = model.dispatch_stats()  # type: ignore[operator]
        return counters["experts"]["virtual:0"]["reuse"]
    finally:
        undispatch(model)


def _slots(profile: Profile, sizes: Sizes) -> int:
    """Return how many experts the cache of the accelerator holds under the budget."""
    from bigmodel.plan import plan

    return plan(profile, budget_of(profile)).expert_cache[0] // sizes.expert_bytes


def budget_of(profile: Profile) -> dict[Any, Any]:
    """Return a budget of the accelerator for a quarter of the weights."""
    return {0: profile.weights // 4 + profile.activations, "cpu": "64GB"}


def planned(profile: Profile, machine: MachineProfile, ratio: float, reuse: float) -> dict[str, Plan]:
    """Return the three plans under a budget for a quarter of the weights, and the streaming one's other divisions.

    Args:
        profile: Of the mixture.
        machine: With the speeds that are set.
        ratio: Of a fetch's seconds to those of computing an expert.
        reuse: As for `plan`.
    """
    from bigmodel.plan import plan
    from bigmodel.plan.result.expert_split import ExpertSplit

    given: dict[str, Any] = {"machine": machine, "expert_reuse": reuse}
    plans = {way: plan(profile, budget_of(profile), offload=way, **given) for way in (STREAM, COMPUTE, AUTO)}
    for name, times in DIVISIONS.items():
        plans[name] = replace(plans[STREAM], expert_split=ExpertSplit(times * ratio, 1.0, 0.0, below=2))
    return plans


def seconds_of_step(model: nn.Module, plan: Plan, traces: Iterator[Trace], sizes: Sizes, ratio: float) -> float:
    """Return the mean seconds of a step under a plan on the next trace, once the cache is filled.

    Args:
        model: The mixture.
        plan: Where its weights are.
        traces: What its routers choose.
        sizes: Those of the mixture.
        ratio: Of a fetch's seconds to those of computing an expert.
    """
    import torch

    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model, undispatch

    from .steps import Decoder

    decoder = Decoder(dispatch_model(model, plan), "virtual:0")
    try:
        with following(model, next(traces)):
            virtual.configure(0)
            # A prompt would take as long as all steps.
            decoder.feed(torch.ones(1, 1, dtype=torch.long).to(decoder.device))
            for _ in range(FILLING - 1):
                decoder.step()
            virtual.configure(0, bandwidth=sizes.rate(ratio))
            with host_of_speed(model, sizes.host_seconds(ratio) / sizes.elements):
                return elapsed(lambda: [decoder.step() for _ in range(sizes.steps)], decoder.device) / sizes.steps
    finally:
        undispatch(model)


def seconds_by_accelerate(model: nn.Module, traces: Iterator[Trace], sizes: Sizes, ratio: float) -> float:
    """Return the seconds of a step of a mixture that accelerate offloads, on the next trace; it keeps no experts.

    Args:
        model: A mixture in host memory that is for this only.
        traces: What its routers choose.
        sizes: Those of the mixture.
        ratio: Of a fetch's seconds to those of computing an expert.
    """
    import torch

    from bigmodel.devices import virtual

    from .peers import streamed_by_accelerate
    from .steps import Decoder

    if not hasattr(model, "_hf_hook"):
        streamed_by_accelerate(model, "virtual:0")
    decoder = Decoder(model, "virtual:0")
    with following(model, next(traces)):
        virtual.configure(0)
        decoder.feed(torch.ones(1, 1, dtype=torch.long).to(decoder.device))
        virtual.configure(0, bandwidth=sizes.rate(ratio))
        return elapsed(decoder.step, decoder.device)
