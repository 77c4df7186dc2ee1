"""How long does a request wait for a model that takes the place of another, beside the copy of its weights?

A process of `bigmodel serve` has two models whose budget holds one. A request to the one that is not there has the
other unloaded, and waits for its weights to cross the link; the same request again tells what answering takes. On a
virtual accelerator the link has a set speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Table, Variant, measure
from .serve_client import completion, exchange
from .serve_model import random_llama, word_tokenizer
from .serve_peer import wait_until_ready

SWAP, AGAIN = "the model is swapped in", "it is there"
BOUND = 1.1

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "the bytes of a swap are held against a link of a set speed"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 2x64")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second of the virtual link")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Ask two models in turns, each twice."""
    size = options.size or ("2x64" if options.quick else "16x2048")
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        folders = {name: _saved(Path(scratch) / name, size, seed) for seed, name in enumerate("ab")}
        nbytes = sum(path.stat().st_size for path in folders["a"].glob("*.safetensors"))
        budget = nbytes + max(nbytes // 4, 2 << 20)  # and what keys, values and activations take
        with _serving(list(folders.values()), budget, options.bandwidth) as port:
            turns = _Turns(port)
            for _ in range(2):  # each is planned, checked and measured the first time
                turns.swap()
            variants = [Variant(SWAP, turns.swap), Variant(AGAIN, turns.again)]
            samples = measure(variants, options.rounds, seed=options.seed)
    link = nbytes / options.bandwidth
    alone = samples.median(SWAP) - samples.median(AGAIN)
    rows: list[list[Any]] = [[nbytes, link, samples.median(SWAP), samples.median(AGAIN), alone, alone / link]]
    columns = [Column("bytes", "bytes"), Column("over the link", "seconds"), Column(SWAP, "seconds")]
    columns += [Column(AGAIN, "seconds"), Column("a swap", "seconds"), Column("of its bytes over the link", "ratio")]
    title = f"The first token of a Llama of {size}, at {options.bandwidth / 1e9:g} GB/s"
    limits = [] if options.quick else [Limit("a swap over its bytes over the link", alone / link, "<=", BOUND)]
    settings = {"size": size, "bandwidth": options.bandwidth}
    return Report(
        "serve_swap", options.device, settings, [Table(title, columns, rows)], limits, samples={"request": samples}
    )


def _saved(folder: Path, size: str, seed: int) -> Path:
    random_llama(size, seed).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


class _Turns:
    """Asks two models for a token in turns."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._names = ["a", "b"]

    def swap(self) -> float:
        """Seconds until the one that is not there has answered."""
        self._names.reverse()
        return self.again()

    def again(self) -> float:
        """Seconds until the one that is there has answered."""
        begun = time.perf_counter()
        body = {"model": self._names[0], "prompt": "1 2 3", "max_tokens": 1, "temperature": 0}
        status, answer = asyncio.run(exchange(self._port, completion(body)))
        if status != 200:
            raise BenchmarkError(f"the server answered {status}: {answer[:300].decode()}")
        return time.perf_counter() - begun


@contextlib.contextmanager
def _serving(folders: list[Path], budget: int, bandwidth: float) -> Iterator[int]:
    """The port of a server of two models on a virtual accelerator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bigmodel.cli.main", "serve", *map(str, folders), "--port", str(port)]
    command += ["--max-memory", f"0={budget},cpu=8GiB", "--max-model-len", "128", "--log-level", "warning"]
    command += ["--max-sequences", "2", "--no-prefix-cache"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "BIGMODEL_VIRTUAL": f"1x{budget}@{bandwidth / 1e9:g}GB"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_until_ready("bigmodel serve", "ready", process, port, log)
            yield port
        finally:
            process.terminate()
            process.wait()
