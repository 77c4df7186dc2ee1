"""What does batching give requests to models with recurrent states, and do they have the tokens they have alone?

Eight prompts of ragged lengths are answered by one engine, all at once and one after another, and by a `generate` of
transformers for each. Weights are random; layers of the models have states in the place of keys and values, or beside
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError, Column, Limit, Report, Samples, Table, Variant, measure
from .harness.devices import first_device, is_virtual
from .serve_model import VOCABULARY, PromptJob, ragged_jobs, run_jobs, started_engine
from .serve_throughput import one_by_one

if TYPE_CHECKING:
    from bigmodel.server.engine import Engine

BATCH, ALONE, GENERATE = "engine, all at once", "engine, one after another", "transformers, one after another"
FASTER = 2.0

DEVICES = ("cpu", "cuda", "virtual")
"""Devices that this benchmark supports."""


def _falcon_h1(width: int, layers: int) -> dict[str, Any]:
    """Attention and Mamba 2 side by side in each layer."""
    mamba = {"mamba_d_ssm": width, "mamba_n_heads": width // 64, "mamba_d_head": 64, "mamba_d_state": 64}
    return {**_attention(width, layers), **mamba, "mamba_n_groups": 1}


def _qwen3_next(width: int, layers: int) -> dict[str, Any]:
    """Linear attention by the delta rule in three layers of four, and experts."""
    heads = {"linear_num_key_heads": width // 128, "linear_num_value_heads": width // 64}
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return {**_attention(width, layers), **heads, **sizes, **experts, "shared_expert_intermediate_size": width}


def _qwen3_5(width: int, layers: int) -> dict[str, Any]:
    """As Qwen3-Next, without experts."""
    heads = {"linear_num_key_heads": width // 128, "linear_num_value_heads": width // 64}
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    return {**_attention(width, layers), **heads, **sizes}


def _jamba(width: int, layers: int) -> dict[str, Any]:
    """Mamba 1 and attention in turn, and experts in every other layer."""
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    mamba = {"mamba_d_state": 16, "mamba_dt_rank": width // 16, "use_mamba_kernels": False}
    return {**_attention(width, layers), **periods, **experts, **mamba, "pad_token_id": None}


def _mamba(width: int, layers: int) -> dict[str, Any]:
    """No attention at all, and the states of Mamba 1."""
    return {"hidden_size": width, "num_hidden_layers": layers, "state_size": 16}


def _mamba2(width: int, layers: int) -> dict[str, Any]:
    """No attention at all."""
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_heads": width // 32, "head_dim": 64, "state_size": 64,
        "n_groups": 1,
    }  # fmt: skip


def _attention(width: int, layers: int) -> dict[str, Any]:
    heads = width // 64
    return {
        "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 3 * width, "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4), "max_position_embeddings": 2048,
    }  # fmt: skip


MODELS: dict[str, tuple[str, Callable[[int, int], dict[str, Any]]]] = {
    "falcon-h1": ("FalconH1Config", _falcon_h1),
    "qwen3-next": ("Qwen3NextConfig", _qwen3_next),
    "qwen3.5": ("Qwen3_5TextConfig", _qwen3_5),
    "jamba": ("JambaConfig", _jamba),
    "mamba": ("MambaConfig", _mamba),
    "mamba2": ("Mamba2Config", _mamba2),
}
"""Config of transformers and its sizes, by the name of a model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)} (default: all)")
    parser.add_argument("--size", default=None, help="layers x width, as in 4x768 (default)")
    parser.add_argument("--requests", type=int, default=8, help="requests")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.set_defaults(rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure tokens per second of each way for each model, and compare tokens."""
    from bigmodel.devices import virtual

    names = options.models.split(",")
    for name in names:
        if name not in MODELS:
            raise BenchmarkError(f"--models {name}: not one of {', '.join(MODELS)}")
    size = options.size or ("4x128" if options.quick else "4x768")
    if is_virtual(options.device):
        virtual.enable(count=1)
    jobs = ragged_jobs(options.requests, seed=options.seed, tokens=options.tokens)
    tables, limits, kept = [], [], {}
    for name in names:
        samples, differ = _measured(name, size, jobs, options)
        kept[name] = samples
        tables.append(_table(name, size, samples, options))
        limits.append(Limit(f"{name}: answers with other tokens than alone", differ, "==", 0, "count"))
        if not options.quick:
            faster = samples.ratio(ALONE, BATCH).median
            limits.append(Limit(f"{name}: all at once, times faster than one after another", faster, ">=", FASTER))
    settings = {"size": size, "requests": options.requests, "tokens": options.tokens}
    return Report("serve_hybrid", options.device, settings, tables, limits, samples=kept)


def _measured(name: str, size: str, jobs: list[PromptJob], options: argparse.Namespace) -> tuple[Samples, int]:
    """Return the samples of one model, and how many answers have other tokens in a batch than alone."""
    engine = started_engine(
        built(name, size, options.seed, options.device), max_sequences=len(jobs), prefix_cache=False
    )
    model = built(name, size, options.seed, options.device)
    try:
        together, alone = tokens_of(engine, jobs), [tokens_of(engine, [job])[0] for job in jobs]
        variants = [
            Variant(BATCH, lambda: run_jobs(engine, jobs)[0]),
            Variant(ALONE, lambda: sum(run_jobs(engine, [job])[0] for job in jobs)),
            Variant(GENERATE, partial(one_by_one, model, jobs)),
        ]
        samples = measure(variants, options.rounds, seed=options.seed)
    finally:
        engine.stop()
    return samples, sum(one != other for one, other in zip(together, alone, strict=True))


def built(name: str, size: str, seed: int, device: str) -> Any:
    """A model of `MODELS` with random weights, on the host or an accelerator."""
    import torch
    import transformers

    config, sizes = MODELS[name]
    layers, width = map(int, size.split("x"))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(vocab_size=VOCABULARY, eos_token_id=None, **sizes(width, layers))
    )
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return model.to(first_device(device), dtype).eval()


def tokens_of(engine: Engine, jobs: list[PromptJob]) -> list[list[int]]:
    """The tokens of the answers, all asked at once."""
    return [timed.token_ids for timed in run_jobs(engine, jobs)[1]]


def _table(name: str, size: str, samples: Samples, options: argparse.Namespace) -> Table:
    total = options.requests * options.tokens
    columns = [Column("way"), Column("tokens/s", "count"), Column("over one after another", "ratio")]
    rows: list[list[Any]] = [
        [way, total / samples.median(way), samples.ratio(ALONE, way).median] for way in (BATCH, ALONE, GENERATE)
    ]
    return Table(f"{options.requests} requests of {options.tokens} tokens, {name} of {size}", columns, rows)
