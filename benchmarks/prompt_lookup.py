"""How much faster is a streamed model with prompt lookup, beside the tokens that each of its steps accepts?

A step over streamed weights costs what fetching them does, however many tokens it computes: proposed tokens that are
accepted are free but for their arithmetic. Two texts: one that comes to repeat itself, as greedy decoding of random
weights does, and one that is drawn at random, where nothing is accepted and proposing should cost nothing. The first is
generated in the same rounds by transformers, too, with its own prompt lookup and without, by the same model streamed by
accelerate.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .harness.devices import first_device, is_virtual
from .harness.report import Cell
from .peers import generated, streamed_by_accelerate
from .serve_model import PromptJob, random_llama, run_jobs, started_engine
from .serve_streamed import streamed_model

if TYPE_CHECKING:
    from bigmodel.server.engine import Engine

WITHOUT, WITH = "without", "with"
REPEATS, DRAWN = "repeats itself", "drawn at random"
TRANSFORMERS = f"{REPEATS}, transformers"
PROPOSED = 8
GAIN = 0.9
"""Times faster over tokens of a step, at least."""

SLOWER = 1.05
"""Seconds of a token with proposals that are rejected, over those without any, at most."""

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--bandwidth", type=float, default=0.25e9, help="bytes a second of the virtual link")
    parser.set_defaults(device="virtual", rounds=3)


@dataclass
class Text:
    """One way of generating a text.

    Attributes:
        engine: With proposals or without.
        temperature: 0 for the text that repeats itself.
        per_step: Tokens of a step, of each run.
    """

    engine: Engine
    job: PromptJob
    temperature: float
    per_step: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Return the seconds of a token."""
        before = self.engine.core.steps
        seconds, _ = run_jobs(self.engine, [self.job], temperature=self.temperature)
        self.per_step.append(self.job.tokens / (self.engine.core.steps - before))
        return seconds / self.job.tokens


@dataclass
class Peer:
    """The text that repeats itself, as transformers generates it with a model that accelerate streams.

    Attributes:
        proposed: Most tokens proposed in a step; 0 for none.
    """

    model: Any
    job: PromptJob
    device: str
    proposed: int
    per_step: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Return the seconds of a token."""
        how = {"prompt_lookup_num_tokens": self.proposed} if self.proposed else {}
        begun = time.perf_counter()
        found = generated(self.model, self.job.prompt, self.job.tokens, self.device, **how)
        self.per_step.append(self.job.tokens / found.forwards)
        return (time.perf_counter() - begun) / self.job.tokens


def run(options: argparse.Namespace) -> Report:
    """Measure both texts with and without proposals."""
    import torch

    from bigmodel.devices import virtual

    virtually = is_virtual(options.device)
    size = options.size or ("2x64" if options.quick else "4x512" if virtually else "16x2048")
    if virtually:
        virtual.enable(count=1, capacity="2GiB", bandwidth=options.bandwidth)
    model = streamed_model(size, options.seed, first_device(options.device))
    tokens = 17 if options.quick else options.tokens
    job = PromptJob([5, 6, 7, 8] * 4, tokens)
    engines = {
        name: started_engine(model, kv_bytes=256 << 20, prefix_cache=False, prompt_lookup=proposed)
        for name, proposed in ((WITHOUT, 0), (WITH, PROPOSED))
    }
    texts = {
        f"{kind}, {name}": Text(engine, job, temperature)
        for kind, temperature in ((REPEATS, 0.0), (DRAWN, 1.0))
        for name, engine in engines.items()
    }
    device = first_device(options.device)
    peer = random_llama(size, options.seed, torch.bfloat16 if device.startswith("cuda") else None)
    layers = {f"model.layers.{index}": "cpu" for index in range(peer.config.num_hidden_layers)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), device)
    streamed = streamed_by_accelerate(peer, device, {**rest, **layers})
    peers = {
        f"{TRANSFORMERS}, {name}": Peer(streamed, job, device, proposed)
        for name, proposed in ((WITHOUT, 0), (WITH, PROPOSED))
    }
    every: dict[str, Text | Peer] = {**texts, **peers}
    try:
        samples = measure([Variant(name, text.run) for name, text in every.items()], options.rounds, seed=options.seed)
    finally:
        for engine in engines.values():
            engine.stop()
    accepted = sum(texts[f"{REPEATS}, {WITH}"].per_step) / len(texts[f"{REPEATS}, {WITH}"].per_step)
    gain = samples.ratio(f"{REPEATS}, {WITHOUT}", f"{REPEATS}, {WITH}").median
    slower = samples.ratio(f"{DRAWN}, {WITH}", f"{DRAWN}, {WITHOUT}").median
    rows: list[list[Cell]] = [
        [name, sum(text.per_step) / len(text.per_step), samples.median(name)] for name, text in every.items()
    ]
    table = Table(
        f"A Llama of {size}, its layers streamed" + (f" at {options.bandwidth / 1e9:g} GB/s" if virtually else ""),
        [Column("text, prompt lookup"), Column("tokens of a step"), Column("token", "seconds")],
        rows,
    )
    limits = (
        []
        if options.quick
        else [
            Limit("times faster over tokens of a step, where they are accepted", gain / accepted, ">=", GAIN),
            Limit("seconds of a token over those without, where they are rejected", slower, "<=", SLOWER),
        ]
    )
    return Report(
        "prompt_lookup",
        options.device,
        settings={"size": size, "tokens": tokens, "bandwidth": options.bandwidth, "proposed": PROPOSED},
        tables=[table],
        limits=limits,
        samples={"token": samples},
    )
