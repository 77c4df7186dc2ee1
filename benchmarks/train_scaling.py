"""How much faster do two CPU processes train GPT-2 small than one, with one thread each?

Each process trains on batches of its own, of the same size: with two, an optimizer step sees twice the samples, and
gradients (0.5 GB) are averaged beside the backward pass. Every run is a set of fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from functools import partial
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Table, Variant, measure

ONE, TWO, ACCELERATE = "1 process", "2 processes", "2 processes, accelerate"
SPEEDUP = 1.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this question can be asked with."""
    parser.add_argument("--batch", type=int, default=8, help="sequences in one process's batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=2, help="steps behind each value")
    parser.set_defaults(rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure samples a second of one process and of two."""
    sizes = {"batch": options.batch, "tokens": options.tokens, "steps": options.steps, "tiny": options.quick}
    settings = {ONE: ("bigmodel.train", 1), TWO: ("bigmodel.train", 2), ACCELERATE: ("accelerate", 2)}
    variants = [Variant(name, partial(_trained, *setting, sizes)) for name, setting in settings.items()]
    samples = measure(variants, options.rounds, warmup=0, seed=options.seed)
    each = {name: settings[name][1] * options.batch / samples.median(name) for name in settings}
    columns = [Column("run"), Column("step", "seconds"), Column("samples/s"), Column("over 1 process", "ratio")]
    rows = [[name, samples.median(name), f"{each[name]:.2f}", each[name] / each[ONE]] for name in settings]
    limits = [Limit("samples/s of 2 processes over 1", each[TWO] / each[ONE], ">=", SPEEDUP)]
    return Report(
        "train_scaling", "cpu", sizes, [Table("GPT-2 small", columns, rows)], limits, samples={"step": samples}
    )


def _trained(library: str, processes: int, sizes: dict[str, Any]) -> float:
    """Train in fresh processes; return the seconds of a step."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    common |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
    code = f"from benchmarks.train_scaling import worker; worker({library!r}, {json.dumps(sizes)!r})"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise BenchmarkError(f"training with {library} in {processes} processes failed")
    return max(float(output.splitlines()[-1]) for output in outputs)


def worker(library: str, sizes: str) -> None:
    """Train in this process and print the seconds of a step."""
    from importlib import import_module

    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import GPT2Config, GPT2LMHeadModel

    from .harness import elapsed

    given = json.loads(sizes)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = import_module(library).Accelerator(cpu=True)
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100} if given["tiny"] else {}
    model = GPT2LMHeadModel(GPT2Config(**shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = given["batch"] * (given["steps"] + 1) * accelerator.num_processes
    loader = DataLoader(TensorDataset(torch.randint(0, 100, (rows, given["tokens"]))), batch_size=given["batch"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)

    def step() -> None:
        (ids,) = next(batches)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.wait_for_everyone()
    print(elapsed(lambda: [step() for _ in range(given["steps"])], "cpu") / given["steps"])
    accelerator.end_training()
