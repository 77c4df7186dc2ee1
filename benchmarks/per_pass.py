"""How much time is saved by streaming prompts and computing steps on the host, beside only one of the two?

A virtual accelerator computes on the host's cores and is no faster, so the speeds of both devices are simulated, like
that of the link: each layer takes at least as long as on a device of that speed, and at least as long as its operations
take here, which is measured. All plans are made for these speeds, under one budget for half of the model; their
predictions are compared with measurements.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.report import Cell

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigmodel.plan import Plan
    from bigmodel.profile import Profile
    from bigmodel.profile.machine.machine import MachineProfile

STREAM, COMPUTE, AUTO = "stream", "compute", "auto"
FORMS = (STREAM, COMPUTE, AUTO)
LINK = 125e6
"""Bytes per second of the link to the accelerator."""

LIMIT = 0.9

ERROR = 0.2

FETCHED = 1e-3
"""Seconds before a called module begins, from which its weights were waited for: a dispatcher's own work takes less."""

TIMED = 5
"""Number of timed steps of the whole model, from which the time of one operation is derived."""


@dataclass(frozen=True)
class Speed:
    """The speed of one device: seconds to read an element of a matrix, and to multiply it with a row."""

    read: float
    multiply: float

    def seconds(self, elements: int, rows: int) -> float:
        """Return how long a matrix of `elements` takes with `rows` rows."""
        return elements * max(self.read, self.multiply * rows)


SPEEDS = {"cpu": Speed(8e-9, 3.2e-9), "virtual": Speed(1e-10, 4e-11)}
"""The host reads its memory four times as fast as the link; the accelerator computes eighty times as fast."""


@dataclass(frozen=True)
class JobSizes:
    """Layers of the model and their width, tokens of the prompt, and steps after it."""

    layers: int
    width: int
    prompt: int
    steps: int


DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "its plans are made for a link and an accelerator of set speeds, which only a virtual one has"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure a prompt and a step of each plan in the same rounds."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    virtual.enable(1, bandwidth=LINK)
    sizes = JobSizes(4, 64, 16, 2) if options.quick else JobSizes(20, 256, 64, 16)
    model = make(sizes)
    profile = profile_of(model, sizes)
    machine = machine_of(SPEEDS, {name: seconds_of_operation(model, profile, name) for name in SPEEDS})
    plans = {form: planned(profile, machine, form) for form in FORMS}
    variants = []
    for form, plan in plans.items():
        placed = dispatched(model, plan)
        variants.append(Variant(f"{form}: prompt", partial(prompt_seconds, placed, sizes)))
        variants.append(Variant(f"{form}: step", partial(step_seconds, placed, sizes)))
    samples = measure(variants, options.rounds, seed=options.seed)
    return report(options, sizes, plans, samples)


def report(options: argparse.Namespace, sizes: JobSizes, plans: dict[str, Plan], samples: Samples) -> Report:
    """Return the table, and the limits: both forms together beat each of them alone, and steps are as predicted."""
    columns = [Column("offload"), Column("parts of both kinds", "count")]
    for name in ("prompt", "step"):
        columns += [Column(name, "seconds"), Column(f"{name}, predicted", "seconds")]
    columns.append(Column(f"prompt and {sizes.steps} steps", "seconds"))
    rows = [_row(form, plan, sizes, samples) for form, plan in plans.items()]
    jobs = {str(row[0]): float(row[-1] or 0) for row in rows}
    ratio = jobs[AUTO] / min(jobs[STREAM], jobs[COMPUTE])
    return Report(
        "per_pass",
        options.device,
        settings={**vars(sizes), "link": LINK, "speeds": {name: vars(speed) for name, speed in SPEEDS.items()}},
        tables=[
            Table(f"{sizes.layers} layers, half of them resident, prompts of {sizes.prompt} tokens", columns, rows)
        ],
        limits=[
            Limit("a job under offload='auto' over the faster of the others", ratio, "<=", LIMIT),
            Limit("the largest error of a predicted step", _largest_error(plans, samples), "<=", ERROR),
        ],
        samples={"prompts and steps": samples},
    )


def _largest_error(plans: dict[str, Plan], samples: Samples) -> float:
    errors = []
    for form, plan in plans.items():
        assert plan.prediction is not None
        errors.append(abs(plan.prediction.token / samples.median(f"{form}: step") - 1))
    return max(errors)


def _row(form: str, plan: Plan, sizes: JobSizes, samples: Samples) -> list[Cell]:
    prompt, step = samples.median(f"{form}: prompt"), samples.median(f"{form}: step")
    found = plan.prediction
    assert found is not None
    return [form, len(plan.computed_below), prompt, found.prefill, step, found.token, prompt + sizes.steps * step]


def make(sizes: JobSizes) -> nn.Module:
    """Return a Llama of these sizes with random weights and eager attention, on every device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    found: nn.Module = model
    return found


def seconds_of_operation(model: nn.Module, profile: Profile, kind: str) -> float:
    """Return the minimum seconds of one operation of a step on a device, at any simulated speed: the median time of a
    step of `model` there, divided by its operations."""
    import copy

    import torch

    device = "cpu" if kind == "cpu" else f"{kind}:0"
    there = copy.deepcopy(model).to(device)
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        step = partial(there, token, use_cache=False)
        step()
        taken = statistics.median(elapsed(step, device) for _ in range(TIMED))
    return taken / sum(map(len, profile.phases[-1].trace.work().values()))


def machine_of(speeds: dict[str, Speed], operation: dict[str, float], rate: float = LINK) -> MachineProfile:
    """Return the profile of a machine with these speeds.

    Args:
        speeds: speed by kind of device.
        operation: minimum seconds of an operation; a layer takes those of all its operations, or those of its speed,
            whichever are more.
        rate: bytes per second of the link.
    """
    from bigmodel.profile.machine.machine import Curve, DeviceLinks, DeviceSpeed, LinkSpeed, MachineProfile

    def device(kind: str) -> DeviceSpeed:
        speed, call = speeds[kind], operation[kind]
        turn = speed.read / speed.multiply
        product = Curve((turn, 2 * turn), (speed.read, 2 * speed.read), grows=True)
        return DeviceSpeed({"product:float32": product, "move": Curve((1.0,), (1e-12,))}, call, call, True)

    link = LinkSpeed(rate)
    return MachineProfile(
        name="set speeds",
        key="set",
        devices={"cpu": device("cpu"), "virtual:0": device("virtual")},
        links={"virtual:0": DeviceLinks(link, link, link, link)},
        memory_rate=4 / speeds["cpu"].read,
        disk_cold=rate,
        disk_warm=rate,
        memory_bytes=2**34,
    )


def profile_of(model: nn.Module, sizes: JobSizes) -> Profile:
    """Return the profile of `model` for a job of these sizes."""
    from bigmodel.profile import profile_model

    return profile_model(
        model,
        context_length=sizes.prompt + sizes.steps,
        new_tokens=sizes.steps,
        device_type="virtual",
        all_logits=False,
    )


def planned(profile: Profile, machine: MachineProfile, offload: str) -> Plan:
    """Return the plan for the whole job with half of the model's memory."""
    from bigmodel.plan import plan

    budgets: dict[Any, Any] = {0: profile.weights // 2 + profile.activations + sum(profile.kv_cache), "cpu": 2**34}
    return plan(profile, budgets, objective="throughput", offload=offload, machine=machine)


def dispatched(
    model: nn.Module, plan: Plan, speeds: dict[str, Speed] = SPEEDS, launching: Mapping[str, float] | None = None
) -> Any:
    """Return a copy of `model` dispatched by the plan, with the simulated speed of its device for each layer.

    Args:
        model: the model, in host memory.
        plan: its plan.
        speeds: speed by kind of device.
        launching: by kind of device, simulated seconds of launching all operations of a layer; None: as here.
    """
    import copy

    from bigmodel.dispatch import dispatch_model

    placed: Any = copy.deepcopy(model)
    for layer in placed.model.layers:
        at_set_speed(layer, speeds, launching or {})
    return dispatch_model(placed, plan, skip_keys=placed._skip_keys_device_placement)


def at_set_speed(layer: Any, speeds: dict[str, Speed], launching: Mapping[str, float]) -> None:
    """Make a layer take at least the simulated time of the device that computes it: of computing, or of launching,
    whichever is more.

    Each module with weights takes its share, from when the device has computed what is before it. Where the dispatcher
    fetches the module's weights first, it begins once they are there: only what is queued ahead hides behind computing.
    """
    from bigmodel.devices.virtual.clock import sleep_until

    elements = sum(parameter.numel() for parameter in layer.parameters())
    at = threading.local()  # asked: when a module was called; computed: when the device has computed all so far

    def begin(*_: object) -> None:
        at.computed = time.perf_counter()

    def timed(module: nn.Module, forward: Callable[..., torch.Tensor], share: float) -> None:
        def asked(*_: object) -> None:
            at.asked = time.perf_counter()

        def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
            now = time.perf_counter()
            if now - at.asked > FETCHED:
                at.computed = max(at.computed, now)
            output = forward(*args, **kwargs)
            kind, rows = output.device.type, output.numel() // output.shape[-1]
            at.computed += share * max(speeds[kind].seconds(elements, rows), launching.get(kind, 0.0))
            sleep_until(at.computed)
            return output

        module.register_forward_pre_hook(asked)
        module.forward = compute

    layer.input_layernorm.register_forward_pre_hook(begin)
    for module in layer.modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            timed(module, module.forward, own / elements)


def prompt_seconds(model: Any, sizes: JobSizes) -> float:
    """Return the seconds of a prompt that follows another job."""
    import torch

    with torch.inference_mode():
        return elapsed(partial(_begun, model, sizes), "virtual:0")


def step_seconds(model: Any, sizes: JobSizes) -> float:
    """Return the mean seconds of steps that follow a prompt; the first one moves the cache, if the device changes."""
    import torch

    with torch.inference_mode():
        cache = _begun(model, sizes)
        token = torch.ones(1, 1, dtype=torch.long, device="virtual:0")

        def steps() -> None:
            for _ in range(sizes.steps):
                model(token, past_key_values=cache, use_cache=True)

        return elapsed(steps, "virtual:0") / sizes.steps


def _begun(model: Any, sizes: JobSizes) -> Any:
    import torch

    ids = torch.arange(sizes.prompt, device="virtual:0").view(1, -1)
    return model(ids, use_cache=True, logits_to_keep=1).past_key_values
