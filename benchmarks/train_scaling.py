"""How much faster do two CPU processes train GPT-2 small than one, with one thread each?

The batch size per process is the same: with two, an optimizer step processes twice the samples, and gradients (0.5 GB)
are averaged during the backward pass. Bare PyTorch (DistributedDataParallel) and accelerate run the same steps. All
processes are started once; only those of the current variant compute.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Table, Variant, measure

ONE, TWO, BARE, ACCELERATE = "1 process", "2 processes", "2 processes, bare PyTorch", "2 processes, accelerate"
SETTINGS = {ONE: ("bigmodel", 1), TWO: ("bigmodel", 2), BARE: ("torch", 2), ACCELERATE: ("accelerate", 2)}
SPEEDUP = 1.8

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it compares one process of the host with two"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--batch", type=int, default=8, help="sequences in one process's batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=1, help="steps behind each value")
    parser.set_defaults(rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure the samples per second of one process and of two."""
    sizes = {"batch": options.batch, "tokens": options.tokens, "steps": options.steps, "tiny": options.quick}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(TrainingRun(*setting, sizes)) for name, setting in SETTINGS.items()}
        for one in runs.values():
            one.wait()
        variants = [Variant(name, one.train) for name, one in runs.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    each = {name: SETTINGS[name][1] * options.batch / samples.median(name) for name in SETTINGS}
    columns = [Column("run"), Column("step", "seconds"), Column("samples/s"), Column("over 1 process", "ratio")]
    rows = [[name, samples.median(name), f"{each[name]:.2f}", each[name] / each[ONE]] for name in SETTINGS]
    limits = [Limit("samples/s of 2 processes over 1", each[TWO] / each[ONE], ">=", SPEEDUP)]
    return Report(
        "train_scaling", "cpu", sizes, [Table("GPT-2 small", columns, rows)], limits, samples={"step": samples}
    )


class TrainingRun:
    """The processes of one variant, which run steps on request."""

    def __init__(self, library: str, processes: int, sizes: dict[str, Any]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        common |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
        code = f"from benchmarks.train_scaling import worker; worker({library!r}, {json.dumps(sizes)!r})"
        self._library = library
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill() if error[0] is not None else None
            process.communicate()

    def wait(self) -> float:
        """Wait for all processes; return the seconds of a step of the slowest."""
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise BenchmarkError(f"training with {self._library} in {len(self._processes)} processes failed")
        return max(map(float, answers))

    def train(self) -> float:
        """Have every process run its steps; return the seconds of one step."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return self.wait()


def worker(library: str, sizes: str) -> None:
    """Train in this process: first a step on one token, then the requested steps for each line of standard input."""
    import torch

    from .harness import elapsed

    given = json.loads(sizes)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare = _bare() if library == "torch" else _prepared(library)
    step = prepare(_model(given["tiny"]))
    _print(elapsed(lambda: step(torch.ones(1, 1, dtype=torch.long)), "cpu"))
    ids = torch.randint(0, 100, (given["batch"], given["tokens"]))
    for _ in sys.stdin:
        _print(elapsed(lambda: [step(ids) for _ in range(given["steps"])], "cpu") / given["steps"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _print(seconds: float) -> None:
    print(seconds, flush=True)


def _model(tiny: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100} if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**shape))


def _prepared(library: str) -> Callable[[Any], Callable[[Any], None]]:
    from importlib import import_module

    import torch

    accelerator = import_module(library).Accelerator(cpu=True)

    def prepare(model: Any) -> Callable[[Any], None]:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))

        def step(ids: Any) -> None:
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def _bare() -> Callable[[Any], Callable[[Any], None]]:
    import torch

    torch.distributed.init_process_group("gloo")

    def prepare(model: Any) -> Callable[[Any], None]:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

        def step(ids: Any) -> None:
            wrapped(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare
