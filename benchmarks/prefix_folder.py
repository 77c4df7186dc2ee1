"""How much sooner does an answer begin when its prompt is read from the prefix cache's files and not computed?

Each round starts three engines and asks each for one token after the same long prompt: without files, with files that
are in the page cache, and with files that were evicted from it. A new engine has nothing in memory, as after a restart.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .harness.pagecache import evict
from .serve_model import PromptJob, run_jobs, served_llama, word_tokenizer

if TYPE_CHECKING:
    from bigmodel.server.engine import Engine

COMPUTED, READ, EVICTED = "computed", "read from the page cache", "read from disk"
GAIN = 10

QUESTION = 16
"""Tokens of the prompt after its last whole block: they are computed in any case."""

DEVICES = ("cpu", "virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--tokens", type=int, default=1936, help="tokens of the prompt")


@dataclass
class Started:
    """A variant: a new engine for each run.

    Attributes:
        make: Makes the engine.
        before: Done before it is made.
        engine: The engine of the next run.
    """

    make: Callable[[], Engine]
    job: PromptJob
    cached: int
    before: Callable[[], object] = lambda: None
    engine: Engine | None = None

    def prepare(self) -> None:
        """Start an engine with an empty memory."""
        if self.engine is not None:
            self.engine.stop()
        self.before()
        self.engine = self.make()
        self.engine.start()

    def run(self) -> float:
        """Return the seconds until the first token."""
        assert self.engine is not None
        seconds, _ = run_jobs(self.engine, [self.job])
        found = self.engine.core.scheduler.prefix.hits
        if found != self.cached:
            raise RuntimeError(f"{found} tokens came from the cache, not {self.cached}")
        return seconds


def run(options: argparse.Namespace) -> Report:
    """Measure the time to the first token, computed and read."""
    from bigmodel.server.engine import EngineOptions, build_engine
    from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK

    size, model = served_llama(options)
    tokens = 3 * PROMPT_BLOCK if options.quick else options.tokens // PROMPT_BLOCK * PROMPT_BLOCK
    job = PromptJob([7 * n % 8192 for n in range(tokens + QUESTION)], 1)
    with tempfile.TemporaryDirectory(prefix="bigmodel-prefix-", dir=options.workdir) as name:
        folder = Path(name)

        def engine(where: Path | None) -> Engine:
            limits = EngineOptions(max_sequences=1, kv_bytes=1 << 30, prefix_folder=where)
            return build_engine(model, word_tokenizer(), options=limits, checkpoint=size)

        writer = Started(lambda: engine(folder), job, 0)
        writer.prepare()
        writer.run()
        assert writer.engine is not None
        writer.engine.stop()
        files = list(folder.rglob("*.safetensors"))
        made = {
            COMPUTED: Started(lambda: engine(None), job, 0),
            READ: Started(lambda: engine(folder), job, tokens),
            EVICTED: Started(lambda: engine(folder), job, tokens, lambda: evict(files)),
        }
        variants = [Variant(name, variant.run, variant.prepare) for name, variant in made.items()]
        try:
            samples = measure(variants, options.rounds, seed=options.seed)
        finally:
            for variant in made.values():
                if variant.engine is not None:
                    variant.engine.stop()
        nbytes = sum(file.stat().st_size for file in files)
    seconds = {name: samples.median(name) for name in made}
    rows: list[list[Any]] = [[name, seconds[name], samples.ratio(COMPUTED, name).median] for name in made]
    columns = [Column("prompt"), Column("first token", "seconds"), Column("sooner", "ratio")]
    table = Table(f"A Llama of {size}, {len(job.prompt)} tokens of prompt", columns, rows)
    limits = (
        []
        if options.quick
        else [
            Limit(f"first token computed over {name}", samples.ratio(COMPUTED, name).median, ">=", GAIN)
            for name in (READ, EVICTED)
        ]
    )
    settings = {"size": size, "tokens": len(job.prompt), "bytes": nbytes}
    return Report(
        "prefix_folder", options.device, settings=settings, tables=[table], limits=limits, samples={"": samples}
    )
