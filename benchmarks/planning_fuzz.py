"""Do budgets hold, whatever the model, the budgets and the shapes? Random ones, run for real on virtual accelerators.

Each model is planned by the search, dispatched by the plan, and generates the planned shape. A device whose peak passes
its budget is a violation; a peak that is not the predicted one to the byte is counted too.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .harness import Column, Limit, Report, Table, run_isolated

PIECE = 100
"""Cases that run in one process."""

EXACT = "all resident, peaks predicted to the byte"
STREAMED = "parts streamed, peaks predicted to the byte"
NEARLY = "within the budgets, but not the predicted peaks"
VIOLATED = "a budget was passed"
REFUSED = "refused: the model does not fit"
HOST_ALONE = "the host runs it all"
OUTCOMES = (EXACT, STREAMED, NEARLY, VIOLATED, REFUSED, HOST_ALONE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this question can be asked with."""
    parser.add_argument("--cases", type=int, default=None, help="how many are run (default: 500)")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Run random cases in processes of their own, some hundred in each, and count what does not hold."""
    count = options.cases or (5 if options.quick else 500)
    found: Counter[str] = Counter()
    notes: list[str] = []
    for first in range(0, count, PIECE):
        outcomes = run_isolated(fuzz, first=first, count=min(PIECE, count - first), seed=options.seed)
        found.update(outcome for outcome, _ in outcomes)
        notes += [said for _, said in outcomes if said]
    return report(options.device, count, found, notes)


def report(device: str, count: int, found: Mapping[str, int], notes: Sequence[str]) -> Report:
    """Return how many cases had which outcome, and the limits."""
    return Report(
        "planning_fuzz",
        device,
        settings={"cases": count},
        tables=[
            Table(
                "Random models, budgets and shapes",
                [Column("outcome"), Column("cases", "count")],
                [[name, found.get(name, 0)] for name in OUTCOMES],
            )
        ],
        limits=[Limit("budget violations", float(found.get(VIOLATED, 0)), "==", 0, "count")],
        notes=[f"not as predicted: {said}" for said in notes[:5]],
    )


def fuzz(first: int, count: int, seed: int) -> list[tuple[str, str]]:
    """Run cases number `first` and following; return the outcome of each and, where it is none of the good ones, which.

    Args:
        first: number of the first case; a case is the same whatever came before it.
        count: how many cases.
        seed: of all cases.
    """
    import torch
    from transformers.utils import logging

    from bigmodel.devices import virtual

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes = []
    for number in range(first, first + count):
        virtual.enable(2)
        outcomes.append(_outcome(number, random.Random(f"{seed} {number}")))
    return outcomes


def _outcome(number: int, draw: random.Random) -> tuple[str, str]:
    import torch

    from bigmodel.errors import BudgetError
    from bigmodel.plan import plan
    from bigmodel.profile import profile_model
    from bigmodel.profile.machine.machine import nominal_machine

    torch.manual_seed(number)
    model = random_model(draw)
    new_tokens = draw.randint(1, 3)
    shapes: dict[str, Any] = {"batch_size": draw.randint(1, 3), "context_length": draw.randint(new_tokens + 2, 64)}
    profile = profile_model(model, **shapes, new_tokens=new_tokens, device_type="virtual")
    whole = profile.weights + profile.activations + sum(profile.kv_cache)
    budgets: dict[Any, int] = {index: int(draw.uniform(0.2, 1.2) * whole) for index in range(draw.randint(1, 2))}
    budgets["cpu"] = 10**9 if draw.random() < 0.6 else int(draw.uniform(0.0, 0.8) * whole)
    try:
        found = plan(profile, budgets, machine=nominal_machine())
    except BudgetError:
        return REFUSED, ""
    if not isinstance(found.main_device, int):
        return HOST_ALONE, ""
    peaks = peaks_of(model, found)
    wrong = {key: peak for key, peak in peaks.items() if peak != found.devices[key].total}
    planned = {key: found.devices[key].total for key in wrong}
    said = f"case {number}: {type(model).__name__} {shapes}, predicted {planned}, measured {wrong}" if wrong else ""
    if any(peak > budgets[key] for key, peak in peaks.items()):
        return VIOLATED, said
    if wrong:
        return NEARLY, said
    return (STREAMED if found.streamed else EXACT), ""


def random_model(draw: random.Random) -> Any:
    """Return a small model with random weights: a Llama, GPT-2, OPT or Mixtral, of random sizes."""
    import transformers as t

    heads = draw.choice([2, 4])
    width, depth, words = 16 * heads * draw.randint(1, 2), draw.randint(2, 8), draw.randint(50, 600)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "vocab_size": words,
    }
    tied = draw.random() < 0.3
    kind = draw.choice(["llama", "gpt2", "opt", "mixtral"])
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=width, n_layer=depth, n_head=heads, vocab_size=words)).eval()
    if kind == "opt":
        return t.OPTForCausalLM(t.OPTConfig(**sizes, ffn_dim=2 * width, word_embed_proj_dim=width)).eval()
    sizes |= {"intermediate_size": 2 * width, "num_key_value_heads": heads // 2}
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4)).eval()
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()


def peaks_of(model: Any, found: Any) -> dict[int, int]:
    """Return the highest mark of each accelerator of the plan while the planned shape is generated."""
    import gc

    import torch

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.dispatch import dispatch_model, undispatch
    from bigmodel.verify.planned_use import planned_use

    keys = [key for key in found.devices if isinstance(key, int)]
    gc.collect()
    before = {key: memory_allocated(key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        dispatch_model(model, found, offload_dir=folder)
        for key in keys:
            reset_peak_memory(key)
        with torch.inference_mode():
            planned_use(model, found).whole()
        peaks = {key: max_memory_allocated(key) - before[key] for key in keys}
        undispatch(model)
    return peaks
