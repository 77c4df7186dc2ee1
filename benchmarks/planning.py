"""How accurate are plans: peak memory and seconds, predicted and measured, over architectures, shapes and budgets?

Every case runs in a separate process, as `bigmodel verify` does: planned from headers, loaded, run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigmodel.atomic_files import write_text

from .harness import BenchmarkError, Column, Limit, Report, Table, run_isolated
from .harness.report import Cell
from .planning_plot import svg

LARGE, LARGE_ERROR, ALWAYS_ERROR = 100 * 10**6, 0.005, 0.02
TIME_MEDIAN, TIME_P95 = 0.10, 0.20
BANDWIDTH = 2 * 10**9

SIZES: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 16000, "max_position_embeddings": 2048,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 64}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 768, "n_layer": 10, "n_head": 12, "vocab_size": 16000, "n_positions": 2048}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "mixtral": (
        "MixtralForCausalLM",
        {**SIZES, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **SIZES, "num_hidden_layers": 4, "moe_intermediate_size": 512, "n_routed_experts": 16, "n_group": 4,
            "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 1, "num_key_value_heads": 12,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 12, "vocab_size": 16000,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": ("BertForMaskedLM", {**SIZES, "intermediate_size": 3072}),
    "resnet": ("ResNetForImageClassification", {}),
}  # fmt: skip
MIXTURES = ("mixtral", "deepseek-v3")
"""Families whose routers should choose experts uniformly, as trained ones do. With random weights that requires larger
embeddings: with small ones the hidden states of all tokens are almost equal after one layer."""

SMALL: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 96, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
    "gpt2": {"n_embd": 96, "n_layer": 4, "vocab_size": 256},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
}
"""Sizes of a family for quick runs; others use `SMALL_DECODER`."""

SMALL_DECODER = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}
BUDGETS = ("cpu", "disk", "resident", "streamed")
SHAPES = ((1, 256), (4, 128))


@dataclass(frozen=True)
class PlanningCase:
    """One case: an architecture, the number of sequences, their tokens, and the kind of budgets."""

    family: str
    batch_size: int
    context: int
    budget: str


DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "its cases set the capacity of accelerators, which only virtual ones have; `memory` compares one plan"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--families", default=None, help=f"some of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--budgets", default=None, help=f"some of {', '.join(BUDGETS)} (default: all)")
    parser.add_argument("--resume", action="store_true", help="keep cases in the work folder, and take those found")


def run(options: argparse.Namespace) -> Report:
    """Verify every case, and compare maps."""
    findings: list[dict[str, Any]] = []
    for case in cases(options):
        findings += [{"case": case, **one} for one in _resumed(case, options)]
    if not findings:
        raise BenchmarkError("no case matches: check --families and --budgets")
    return report(options, findings)


def _resumed(case: PlanningCase, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the findings of a case; with ``--resume``, those of an earlier run if there are any."""
    shape = f"{case.batch_size}x{case.context}"
    path = options.workdir / f"planning-{case.family}-{shape}-{case.budget}-{options.threads or 1}.json"
    if options.resume and path.exists():
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found
    found = run_isolated(
        verified,
        folder=str(make(case.family, options.workdir, options.quick)),
        batch_size=case.batch_size,
        context=case.context,
        budget=case.budget,
        threads=options.threads or 1,
    )
    if options.resume:
        write_text(path, json.dumps(found))
    return found


def cases(options: argparse.Namespace) -> Iterator[PlanningCase]:
    """Yield the cases."""
    families = options.families.split(",") if options.families else list(FAMILIES)
    budgets = options.budgets.split(",") if options.budgets else list(BUDGETS)
    shapes = ((1, 32),) if options.quick else SHAPES
    for family in families[:1] if options.quick else families:
        for batch_size, context in shapes:
            for budget in budgets:
                yield PlanningCase(family, batch_size, context, budget)


def make(family: str, workdir: Path, quick: bool) -> Path:
    """Return the folder of a checkpoint with random weights, after writing it if it does not exist."""
    import torch
    import transformers

    folder = workdir / f"planning-{family}{'-quick' if quick else ''}"
    if (folder / "config.json").exists():
        return folder
    architecture, sizes = FAMILIES[family]
    model_class: Any = getattr(transformers, architecture)
    small = SMALL.get(family, SMALL_DECODER) if quick else {}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**sizes, **small}))
    if family in MIXTURES:
        torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    return folder


def verified(folder: str, batch_size: int, context: int, budget: str, threads: int) -> list[dict[str, Any]]:
    """Verify one case, in a fresh process."""
    import torch
    from transformers.utils import logging

    from bigmodel.devices import virtual
    from bigmodel.verify.verify import verify

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    # If the machine must be measured, this process does it.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    budgets: dict[Any, int] = {"cpu": 16 * 10**9}
    if budget == "disk":
        budgets = {"cpu": int(0.6 * weights) + 80 * 10**6, "disk": 2**40}  # experts on disk are staged, too
    elif budget != "cpu":
        share = 4.0 if budget == "resident" else 0.6
        os.environ["BIGMODEL_VIRTUAL"] = f"1@{BANDWIDTH}"
        virtual.enable_from_environment()
        budgets = {0: int(share * weights) + 300 * 10**6, "cpu": 16 * 10**9}
        if budget == "streamed":
            budgets[0] = int(0.6 * weights) + 60 * 10**6
    plan, findings = verify(folder, budgets, batch_size=batch_size, context_length=context)
    return [
        {
            "device": one.device,
            "what": one.what,
            "unit": one.unit,
            "predicted": one.predicted,
            "measured": one.measured,
            "error": one.error,
            "budget": plan.devices[0].budget if one.device.startswith("virtual") else None,
        }
        for one in findings
    ]


def report(options: argparse.Namespace, findings: list[dict[str, Any]]) -> Report:
    """Return the tables and limits."""
    memory = [one for one in findings if one["unit"] == "bytes"]
    seconds = [one for one in findings if one["unit"] == "seconds"]
    host = [abs(one["error"]) for one in memory if one["device"] == "cpu" and one["measured"] >= LARGE]
    other = [abs(one["error"]) for one in memory if one["device"] != "cpu" or one["measured"] < LARGE]
    there = [
        abs(one["predicted"] - one["measured"])
        for one in memory
        if one["device"] != "cpu" and one["case"].family not in MIXTURES
    ]
    passed = [one["measured"] - one["budget"] for one in memory if one["budget"] is not None]
    errors = sorted(abs(one["error"]) for one in seconds)
    limits = [Limit("median error of seconds", statistics.median(errors), "<=", TIME_MEDIAN, "percent")]
    limits.append(Limit("95th percentile", errors[int(0.95 * (len(errors) - 1))], "<=", TIME_P95, "percent"))
    if host:
        limits.append(Limit("worst error of host peaks of 100 MB and more", max(host), "<=", LARGE_ERROR, "percent"))
    if other:
        limits.append(Limit("worst error of all other peaks", max(other), "<=", ALWAYS_ERROR, "percent"))
    if there:
        name = "worst difference on the virtual accelerator but of mixtures, whose routers are not foreseen"
        limits.append(Limit(name, float(max(there)), "<=", 64, "bytes"))
    if passed:
        limits.append(Limit("most that a peak passed its budget", float(max(0, *passed, 0)), "<=", 0, "bytes"))
    tables = [
        Table("Peak memory", _columns("bytes"), [_row(one) for one in memory]),
        Table("Time", _columns("seconds"), [_row(one) for one in seconds]),
    ]
    return Report(
        "planning",
        options.device,
        settings={"threads": options.threads or 1},
        tables=tables,
        limits=limits,
        picture=svg([{**one, "family": one["case"].family, "said": _said(one)} for one in findings]),
    )


def _said(one: dict[str, Any]) -> str:
    case: PlanningCase = one["case"]
    return f"{case.batch_size} x {case.context}, {case.budget}: {one['device']} {one['what']}".strip()


def _columns(unit: str) -> list[Column]:
    words = [Column(name) for name in ("family", "shape", "room", "device", "what")]
    return [*words, Column("predicted", unit), Column("measured", unit), Column("error", "percent")]


def _row(one: dict[str, Any]) -> list[Cell]:
    case: PlanningCase = one["case"]
    shape = f"{case.batch_size} x {case.context}"
    return [
        case.family,
        shape,
        case.budget,
        one["device"],
        one["what"],
        one["predicted"],
        one["measured"],
        one["error"],
    ]
