"""Do budgets hold, whatever the model, the budgets and the shapes? Random ones, run for real on virtual accelerators.

Each model is planned by the search, dispatched by the plan, and generates the planned shape. A device whose peak passes
its budget is a violation; a peak that is not the predicted one to the byte is counted too.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from .harness import Column, Limit, Report, Table, run_isolated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this question can be asked with."""
    parser.add_argument("--cases", type=int, default=None, help="how many are run (default: 500)")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Run random cases in a process of their own and count what does not hold."""
    count = options.cases or (5 if options.quick else 500)
    found = run_isolated(fuzz, count=count, seed=options.seed)
    rows = [[name, found[name]] for name in ("run", "refused", "violations", "not to the byte", "streaming")]
    return Report(
        "planning_fuzz",
        options.device,
        settings={"cases": count},
        tables=[Table("Random models, budgets and shapes", [Column("what"), Column("cases", "count")], rows)],
        limits=[Limit("budget violations", float(found["violations"]), "==", 0, "count")],
        notes=[f"the first that was not as predicted: {found['first']}"] if found["first"] else [],
    )


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Run `count` cases; return how many ran, were refused, passed a budget, or differed from the prediction."""
    import torch

    from bigmodel.devices import virtual
    from bigmodel.errors import BudgetError
    from bigmodel.plan import plan
    from bigmodel.profile import profile_model
    from bigmodel.profile.nominal import nominal_machine

    torch.set_num_threads(1)
    draw, machine = random.Random(seed), nominal_machine()
    result: dict[str, Any] = {
        "run": 0,
        "refused": 0,
        "violations": 0,
        "not to the byte": 0,
        "streaming": 0,
        "first": "",
    }
    for number in range(count):
        virtual.enable(2)
        model = random_model(draw)
        new_tokens = draw.randint(1, 3)
        shapes: dict[str, Any] = {"batch_size": draw.randint(1, 3), "context_length": draw.randint(new_tokens + 2, 64)}
        profile = profile_model(model, **shapes, new_tokens=new_tokens, device_type="virtual")
        whole = profile.weights + profile.activations + sum(profile.kv_cache)
        budgets: dict[Any, int] = {index: int(draw.uniform(0.2, 1.2) * whole) for index in range(draw.randint(1, 2))}
        try:
            found = plan(profile, {**budgets, "cpu": 10**9}, machine=machine)
        except BudgetError:
            result["refused"] += 1
            continue
        if not isinstance(found.main_device, int):
            result["refused"] += 1
            continue
        result["run"] += 1
        result["streaming"] += bool(found.streamed)
        peaks = peaks_of(model, found)
        wrong = {key: peak for key, peak in peaks.items() if peak != found.devices[key].total}
        result["violations"] += any(peak > budgets[key] for key, peak in peaks.items())
        result["not to the byte"] += bool(wrong)
        if wrong and not result["first"]:
            planned = {key: found.devices[key].total for key in wrong}
            result["first"] = f"case {number}: {type(model).__name__} {shapes}, predicted {planned}, measured {wrong}"
    return result


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

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.dispatch import dispatch_model, undispatch
    from bigmodel.dispatch.verify import generate

    keys = [key for key in found.devices if isinstance(key, int)]
    gc.collect()
    before = {key: memory_allocated(key) for key in keys}
    dispatch_model(model, dict(found.device_map), main_device=found.main_device)
    for key in keys:
        reset_peak_memory(key)
    generate(model, found)
    peaks = {key: max_memory_allocated(key) - before[key] for key in keys}
    undispatch(model)
    return peaks
