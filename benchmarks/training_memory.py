"""How accurate is the predicted memory of training, with and without checkpointing, on one rank and two, DDP and FSDP?

Each rank is a separate process on the host, whose peak RSS is measured in the last of several steps.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Table, run_isolated

BOUND, BOUND_SHARDED = 0.005, 0.02
CASES = (
    (1, "ddp", False),
    (1, "ddp", True),
    (2, "ddp", False),
    (2, "ddp", True),
    (2, "fsdp", False),
    (2, "fsdp", True),
)
"""Ranks, strategy, recomputing."""

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000,
}  # fmt: skip
SMALL: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
BATCH, TOKENS = 2, 256
STEPS = 3
"""Training steps, of which the last is measured. DDP rebuilds its buckets in the second, and first writes to them
there.
"""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it measures the resident set of processes of the host"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(options: argparse.Namespace) -> Report:
    """Train in every configuration, and compare the ranks' peaks with the predictions."""
    sizes = SMALL if options.quick else SIZES
    rows = [row for case in CASES for row in _rows(case, sizes)]
    return report(options, rows)


def report(options: argparse.Namespace, rows: list[list[Any]]) -> Report:
    """Return the table and the limit; the last three cells of a row are predicted, measured, error."""
    columns = [Column("ranks", "count"), Column("strategy"), Column("recomputing"), Column("rank", "count")]
    columns += [Column("predicted", "bytes"), Column("measured", "bytes"), Column("error", "percent")]
    whole, sharded = ([abs(row[-1]) for row in rows if (row[1] == "fsdp") is wanted] for wanted in (False, True))
    return Report(
        "training_memory",
        options.device,
        settings={"batch": BATCH, "tokens": TOKENS},
        tables=[Table("Peak memory of a rank that trains with AdamW", columns, rows)],
        limits=[
            Limit("worst error where a rank has the whole model", max(whole), "<=", BOUND, "percent"),
            Limit("worst error where it has a share", max(sharded), "<=", BOUND_SHARDED, "percent"),
        ],
    )


def _rows(case: tuple[int, str, bool], sizes: dict[str, Any]) -> list[list[Any]]:
    ranks, strategy, checkpointing = case
    predicted = run_isolated(predicted_peak, sizes=sizes, ranks=ranks, strategy=strategy, checkpointing=checkpointing)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        measure = partial(
            run_isolated,
            measured_peak,
            sizes=sizes,
            ranks=ranks,
            strategy=strategy,
            checkpointing=checkpointing,
            store=str(Path(folder) / "store"),
        )
        peaks = list(pool.map(lambda rank: measure(rank=rank), range(ranks)))
    words = "yes" if checkpointing else "no"
    return [
        [ranks, strategy, words, rank, predicted, peak, (predicted - peak) / peak] for rank, peak in enumerate(peaks)
    ]


def predicted_peak(sizes: dict[str, Any], ranks: int, strategy: str, checkpointing: bool) -> int:
    """Return the bytes that `training_memory` predicts for one rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from bigmodel.profile import training_memory

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return training_memory(model, BATCH, TOKENS, checkpointing=checkpointing, ranks=ranks, strategy=strategy).total


def measured_peak(sizes: dict[str, Any], ranks: int, strategy: str, checkpointing: bool, store: str, rank: int) -> int:
    """Return the peak RSS in the last step of training, less the memory of libraries."""
    import gc

    import torch
    import torch.distributed as dist

    from bigmodel.devices import HOST, max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.verify.peak_rss import return_freed_memory_at_once

    return_freed_memory_at_once()
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    _train({**sizes, "num_hidden_layers": 1}, ranks, strategy, checkpointing, lambda: None)
    gc.collect()
    return_freed_memory_at_once()
    before = memory_allocated(HOST)
    _train(sizes, ranks, strategy, checkpointing, lambda: reset_peak_memory(HOST))
    peak = max_memory_allocated(HOST) - before
    if ranks > 1:
        dist.destroy_process_group()
    return peak


def _train(sizes: dict[str, Any], ranks: int, strategy: str, checkpointing: bool, before_last: Any) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if ranks > 1 and strategy == "ddp":
        model = DistributedDataParallel(model)
    elif ranks > 1:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    for step in range(STEPS):
        if step == STEPS - 1:
            before_last()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
