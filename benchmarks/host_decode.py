"""How fast does the host decode in bfloat16, int8 and int4, beside llama.cpp with the same weights?

A small Llama is quantised by `bigmodel quantize`, and computed packed (`host_kernels="packed"`). llama.cpp, through the
package xllamacpp, gets GGUF files of the same values: BF16, Q8_0, Q4_0. Both take the same threads, in the same rounds.
Without xllamacpp only our own steps are measured, and nothing is held to a limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.report import Cell
from .llama_cpp import MISSING, PEER, LlamaServer, is_installed

if TYPE_CHECKING:
    from torch import nn

LIMITS = {"bfloat16": 1.10, "int8": 1.25, "int4": 1.35}
"""Largest ratio of our step to llama.cpp's, by weights."""

OURS = "bigmodel"
PROMPT = 16
PROMPTS = 3
"""Rounds of prompts, at most: each takes seconds."""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it compares what the host computes"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=16, help="decode steps behind each value")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")


def run(options: argparse.Namespace) -> Report:
    """Measure seconds of a step and of a prompt with each kind of weights, ours and llama.cpp's in turns."""
    import torch

    from .packed import quantised

    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    steps, prompt = (2, 32) if options.quick else (options.steps, options.prompt)
    targets = [name for name in LIMITS if name != "bfloat16"]
    folders = quantised("tiny-half" if options.quick else "llama-400m", targets, options.workdir)
    found: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
    for name, folder in folders.items():
        found[_variant(name, OURS)] = _ours(folder, name in targets, steps, prompt)
    peers = not options.no_peers and is_installed()
    if peers:
        found |= {_variant(name, PEER): _peer(folder, threads, steps, prompt) for name, folder in folders.items()}
    of_steps, of_prompts = (
        measure([Variant(name, each[place]) for name, each in found.items()], rounds, seed=options.seed)
        for place, rounds in enumerate((options.rounds, min(options.rounds, PROMPTS)))
    )
    nbytes = {name: _bytes(folder) for name, folder in folders.items()}
    return Report(
        "host_decode",
        options.device,
        settings={"model": folders["bfloat16"].name, "steps": steps, "prompt": prompt, "threads": threads},
        tables=[
            _table("One step of generation", of_steps, nbytes, peers),
            _table(f"A prompt of {prompt} tokens", of_prompts, None, peers),
        ],
        limits=limits(of_steps) if peers else [],
        notes=[
            "int8 has a scale for each row, which Q8_0 has again in each block of 32; int4 has groups of 32 in both",
            *([] if peers else [MISSING]),
        ],
        samples={"step": of_steps, "prompt": of_prompts},
    )


def limits(samples: Samples) -> list[Limit]:
    """Return the limits on our steps over llama.cpp's."""
    return [
        Limit(
            f"{name}: step over that of {PEER}",
            samples.ratio(_variant(name, OURS), _variant(name, PEER)).median,
            "<=",
            most,
        )
        for name, most in LIMITS.items()
    ]


def _variant(weights: str, who: str) -> str:
    return f"{weights}, {who}"


def _bytes(folder: Path) -> int:
    from bigmodel.checkpoint import Checkpoint

    saved = Checkpoint.open(folder)
    return sum(saved.entry(key).nbytes for key in saved if not key.startswith("model.embed_tokens"))


def _table(title: str, samples: Samples, nbytes: dict[str, int] | None, peers: bool) -> Table:
    """Return a row for each kind of weights and program; of a step also the bytes of our files over its seconds."""
    rows: list[list[Cell]] = []
    for name in LIMITS:
        for who in (OURS, PEER) if peers else (OURS,):
            seconds = samples.median(_variant(name, who))
            over = samples.ratio(_variant(name, who), _variant(name, PEER)).median if peers else None
            rate: list[Cell] = [] if nbytes is None else [nbytes[name] / seconds]
            rows.append([name, who, seconds, over, *rate])
    columns = [Column("weights"), Column("program"), Column("median", "seconds"), Column(f"over {PEER}", "ratio")]
    return Table(title, columns if nbytes is None else [*columns, Column("weights read at", "rate")], rows)


def _ours(folder: Path, is_quantised: bool, steps: int, prompt: int) -> tuple[Callable[[], float], Callable[[], float]]:
    from .models import ours
    from .steps import Decoder

    decoder = Decoder(ours(folder, {"": "cpu"}, host_kernels="packed" if is_quantised else "exact"))
    return partial(decoder.seconds_per_step, steps), partial(_seconds_of_prompt, decoder.model, prompt)


def _seconds_of_prompt(model: nn.Module, tokens: int) -> float:
    import torch

    ids = torch.arange(1, tokens + 1).view(1, -1) % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    with torch.inference_mode():
        return elapsed(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), "cpu")


def _peer(folder: Path, threads: int, steps: int, prompt: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return what measures llama.cpp: its own timings, without those of its HTTP layer and its sampling of text."""
    from .gguf_writer import gguf_of

    server = LlamaServer(gguf_of(folder), context=2 * max(prompt, steps + PROMPT + 1), threads=threads)

    def step() -> float:
        return server.complete([*range(1, PROMPT + 1)], steps + 1)["predicted_per_token_ms"] / 1e3

    return step, lambda: server.complete([*range(1, prompt + 1)], 1)["prompt_ms"] / 1e3
