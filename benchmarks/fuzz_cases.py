"""Random cases of `planning_fuzz`: a model, shapes, budgets and options, and the outcome of running their plan."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

EXACT = "all resident, peaks predicted to the byte"
STREAMED = "parts streamed, peaks predicted to the byte"
BELOW = "a peak below the prediction (mixtures; plans that hold for padded prompts, too)"
ENDS = "reserved as predicted, but for ends of large blocks that were not split off"
ABOVE = "within the budgets, but a peak over the prediction"
VIOLATED = "a budget was passed"
FAILED = "the run failed"
REFUSED = "refused: the model does not fit"
HOST_ALONE = "the host runs it all"
OUTCOMES = (EXACT, STREAMED, BELOW, ENDS, ABOVE, VIOLATED, FAILED, REFUSED, HOST_ALONE)

RAN = (EXACT, STREAMED, BELOW, ENDS, ABOVE, VIOLATED, FAILED)
"""Outcomes of cases in which something ran on an accelerator."""


@dataclass(frozen=True)
class FuzzCase:
    """The random parameters of a case, besides the model.

    Attributes:
        shapes: batch size, context length and new tokens.
        budgets: bytes by device key.
        choices: options of the plan: slots, streamed buffers, link dtype, bytes of the expert cache.
        links: bytes per second of each accelerator's link, of a machine on which streaming over both pays; None: of the
            nominal machine.
        split_blocks: parts are as small as possible.
    """

    shapes: dict[str, Any]
    budgets: dict[Any, int]
    choices: dict[str, Any]
    links: tuple[float, ...] | None = None
    split_blocks: bool = False


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        kind: one of `OUTCOMES`.
        drawn: value by dimension, as text.
        said: predicted and measured bytes, if they differ.
    """

    kind: str
    drawn: Mapping[str, str]
    said: str = ""


def planned(number: int, seed: int, reserved: bool = False) -> str | None:
    """Return the plan of case `number` as JSON; None if it is refused.

    Args:
        number: the case.
        seed: the same cases for the same seed.
        reserved: the accelerators' allocators cache, and the models are larger than their segments.
    """
    from bigmodel.errors import BudgetError

    draw = _begin(number, seed, reserved)
    try:
        return str(plan_of(random_model(draw, _scale(reserved)), draw, reserved).to_json())
    except BudgetError:
        return None


def _begin(number: int, seed: int, reserved: bool) -> random.Random:
    """Enable the accelerators of a case and return what its parameters are drawn with."""
    from bigmodel.devices import virtual

    draw = random.Random(f"{seed} {number}")
    workspace = random.Random(f"{seed} {number} workspace").choice([0, 2**20, 8 * 2**20])
    virtual.enable(2, caching=virtual.Caching(workspace=workspace) if reserved else None)
    return draw


def _scale(reserved: bool) -> int:
    return 3 if reserved else 1


def fuzz(number: int, seed: int, plan: str | None, reserved: bool = False) -> Outcome:
    """Run case `number` by its plan from `planned`. A case does not depend on those before it."""
    from bigmodel.plan import Plan

    draw = _begin(number, seed, reserved)
    model = random_model(draw, _scale(reserved))
    case = random_case(draw, model, reserved)
    found = None if plan is None else Plan.from_json(plan)
    links = "none" if found is None else str(len({part.runs_on for part in found.streamed}))
    drawn = {"model": type(model).__name__, **_values(case), "links streamed over": links}
    kind, said = outcome_of(model, found, case)
    told = f"case {number}: {drawn['model']} {case.shapes} {case.choices}, {said}" if said else ""
    return Outcome(kind, drawn, told)


def _values(case: FuzzCase) -> dict[str, str]:
    cache = case.choices["expert_cache"]
    return {
        "accelerators": str(sum(isinstance(key, int) for key in case.budgets)),
        "slots": str(case.choices["slots"]),
        "streamed buffers": str(case.choices["offload_buffers"]),
        "link dtype": str(case.choices["offload_dtype"]),
        "expert cache": "default" if cache is None else "given",
        "blocks": "split" if case.split_blocks else "whole",
    }


def random_model(draw: random.Random, scale: int = 1) -> Any:
    """Return a small model with random weights: a Llama, GPT-2, OPT, Mixtral or gpt-oss, of random sizes times
    `scale`."""
    import torch
    import transformers as t

    torch.manual_seed(draw.getrandbits(32))
    heads = draw.choice([2, 4])
    width, depth = 16 * heads * draw.randint(1, 2) * scale, draw.randint(2, 8)
    words = draw.randint(50, 600) * scale
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "vocab_size": words,
    }
    tied = draw.random() < 0.3
    kind = draw.choice(["llama", "gpt2", "opt", "mixtral", "gpt_oss"])
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=width, n_layer=depth, n_head=heads, vocab_size=words)).eval()
    if kind == "opt":
        return t.OPTForCausalLM(t.OPTConfig(**sizes, ffn_dim=2 * width, word_embed_proj_dim=width)).eval()
    sizes |= {"intermediate_size": 2 * width, "num_key_value_heads": heads // 2}
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4)).eval()
    if kind == "gpt_oss":
        few: dict[str, Any] = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
        return t.GptOssForCausalLM(t.GptOssConfig(**sizes, **few)).eval()
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()


def random_case(draw: random.Random, model: Any, reserved: bool = False) -> FuzzCase:
    """Return random shapes, budgets and choices for `model`, drawn after it; `reserved`: with room for segments."""
    new_tokens = draw.randint(1, 3)
    shapes = {
        "batch_size": draw.randint(1, 3),
        "context_length": draw.randint(new_tokens + 2, 64),
        "new_tokens": new_tokens,
    }
    weights = sum(tensor.nbytes for tensor in model.parameters())
    whole = int(weights * (1 + shapes["batch_size"] * shapes["context_length"] / 500))
    more = _room() if reserved else 0
    budgets: dict[Any, int] = {index: int(draw.uniform(0.2, 1.2) * whole) + more for index in range(draw.randint(1, 2))}
    budgets["cpu"] = 10**9 if draw.random() < 0.6 else int(draw.uniform(0.0, 0.8) * whole)
    choices = {
        "slots": draw.randint(1, 4),
        "offload_buffers": draw.random() < 0.5,
        "offload_dtype": draw.choice([None, None, "int8", "int4"]),
        "expert_cache": draw.choice([None, int(draw.uniform(0.0, 0.5) * whole)]),
    }
    links_are_nominal, split = draw.random() < 0.5, draw.random() < 0.3
    if links_are_nominal:
        return FuzzCase(shapes, budgets, choices, split_blocks=split)
    small = {index: int(draw.uniform(0.4, 0.65) * whole) + more for index in range(2)}
    links = tuple(draw.choice([1e7, 3e7]) for _ in small)
    return FuzzCase(shapes, {**small, "cpu": 10**9}, {**choices, "slots": draw.choice([1, 2, 2])}, links, split)


def machine_of(case: FuzzCase) -> Any:
    """Return the machine that a case is planned for: the nominal one, or one with slow links and a slower host."""
    from bigmodel.profile.machine.machine import DeviceLinks, LinkSpeed, nominal_machine

    nominal = nominal_machine()
    if case.links is None:
        return nominal
    fast = LinkSpeed(25e9, 1e-5)
    links = {
        f"virtual:{index}": DeviceLinks(LinkSpeed(rate, 1e-5), fast, fast, fast, to_peer=fast)
        for index, rate in enumerate(case.links)
    }
    devices = {
        "cpu": replace(nominal.devices["cpu"], call=1.0, call_cached=1.0),
        "virtual:0": nominal.devices["cuda:0"],
    }
    return replace(nominal, devices=devices, links=links)


def _room() -> int:
    """Return the bytes that budgets of reserved bytes have beyond those of tensors: for two segments that are not full,
    and for that of the workspace."""
    from bigmodel.devices.memory import caching_memory
    from bigmodel.devices.virtual.allocator import SMALL_SEGMENT, segment_bytes

    memory = caching_memory(0)
    workspace = 0 if memory is None or not memory.workspace else segment_bytes(memory.workspace)
    return 2 * SMALL_SEGMENT + workspace


def plan_of(model: Any, draw: random.Random, reserved: bool = False) -> Any:
    """Return the plan of a random case for `model`; `reserved` as for `random_case`.

    Raises:
        BudgetError: it does not fit.
    """
    from bigmodel.plan import plan
    from bigmodel.profile import profile_model

    case = random_case(draw, model, reserved)
    profile = profile_model(model, **case.shapes, device_type="virtual", split_blocks=case.split_blocks)
    return plan(profile, case.budgets, machine=machine_of(case), **case.choices)


def outcome_of(model: Any, found: Any, case: FuzzCase) -> tuple[str, str]:
    """Run `model` by the plan `found` (None: there is none); return the outcome, and bytes that were not predicted."""
    if found is None:
        return REFUSED, ""
    if not isinstance(found.main_device, int):
        return HOST_ALONE, ""
    peaks = peaks_of(model, found)
    planned = {key: (found.devices[key].allocated, found.devices[key].total) for key in peaks}
    different = [key for key in peaks if peaks[key][0] != planned[key][0]]
    beyond = [key for key in peaks if peaks[key][1] > planned[key][1]]
    said = f"predicted {planned}, measured {peaks}, allocated and reserved" if different or beyond else ""
    if any(reserved > case.budgets[key] for key, (_, reserved) in peaks.items()):
        return VIOLATED, said
    if beyond:
        return ABOVE, said
    if different:
        return (ENDS if any(peaks[key][0] > planned[key][0] for key in different) else BELOW), said
    return (STREAMED if found.streamed else EXACT), ""


def peaks_of(model: Any, found: Any) -> dict[int, tuple[int, int]]:
    """Return the most bytes of each accelerator of the plan that tensors were given, and that were reserved for them,
    while the planned shape is generated."""
    import torch

    from bigmodel.devices import reset_peak_memory
    from bigmodel.devices.caching import memory_now, memory_peaks
    from bigmodel.dispatch import dispatch_model, undispatch
    from bigmodel.verify.planned_use import planned_use

    keys = [key for key in found.devices if isinstance(key, int)]
    gc.collect()
    before = {key: memory_now(key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        dispatch_model(model, found, offload_dir=folder)
        for key in keys:
            reset_peak_memory(key)
        with torch.inference_mode():
            planned_use(model, found).whole()
        peaks = {key: memory_peaks(key).beyond(before[key]) for key in keys}
        undispatch(model)
    return {key: (peak.allocated, peak.reserved) for key, peak in peaks.items()}
