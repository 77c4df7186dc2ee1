"""How much sooner does an answer begin when its prompt is read from the prefix cache's files and not computed?

Each round starts three engines and asks each for one token after the same long prompt: without files, with files that
are in the page cache, and with files that were evicted from it. A new engine has nothing in memory, as after a restart.

On the host llama.cpp is asked the same in the same rounds, through the package xllamacpp, with a GGUF file of the same
values and the same threads: with an empty slot, and with one that is restored from a file in the page cache, which is
timed with the first token. Without xllamacpp only our own are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .harness import BenchmarkError, Column, Limit, Report, Samples, Table, Variant, measure
from .harness.pagecache import evict
from .llama_cpp import MISSING, PEER, LlamaServer, build, is_installed
from .serve_model import PromptJob, run_jobs, served_llama, word_tokenizer

if TYPE_CHECKING:
    from bigmodel.server.engine import Engine

COMPUTED, READ, EVICTED = "computed", "read from the page cache", "read from disk"
PEER_COMPUTED, PEER_RESTORED = f"{PEER}, computed", f"{PEER}, saved slot restored"
GAIN = 10
"""Least ratio of computing to reading."""
PEER_RATIO = 1.0
"""Largest ratio of our time with files in the page cache to that of llama.cpp with a restored slot."""

QUESTION = 16
"""Tokens of the prompt after its last whole block: they are computed in any case."""

DEVICES = ("cpu", "virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--tokens", type=int, default=1936, help="tokens of the prompt")
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")


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
        self.stop()
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

    def stop(self) -> None:
        """Stop the engine, if there is one."""
        if self.engine is not None:
            self.engine.stop()


@dataclass(frozen=True)
class Slot:
    """A variant of llama.cpp: its slot is empty before each run.

    Attributes:
        server: The server.
        prompt: Tokens.
        cached: How many of them the slot gets from its file; 0 if all are computed.
    """

    server: LlamaServer
    prompt: list[int]
    cached: int

    FILE: ClassVar = "slot.bin"

    def save(self) -> None:
        """Compute the tokens that are cached, and write them to the file.

        Raises:
            BenchmarkError: Others were written.
        """
        self.server.erase()
        self.server.complete(self.prompt[: self.cached], 1)
        saved = self.server.save(self.FILE)
        if saved != self.cached:
            raise BenchmarkError(f"{PEER} saved {saved} tokens, not {self.cached}")

    def prepare(self) -> None:
        """Empty the slot."""
        self.server.erase()

    def run(self) -> float:
        """Return the seconds until the first token, with those of reading the file.

        Raises:
            BenchmarkError: Other tokens than those of the file were in the slot.
        """
        begun = time.perf_counter()
        restored = self.server.restore(self.FILE) if self.cached else 0
        timings = self.server.complete(self.prompt, 1, reuse=True)
        seconds = time.perf_counter() - begun
        if not restored == timings["cache_n"] == len(self.prompt) - timings["prompt_n"] == self.cached:
            raise BenchmarkError(
                f"{PEER} restored {restored} tokens of a prompt of {len(self.prompt)}, used {timings['cache_n']:.0f} of"
                f" the slot, and computed {timings['prompt_n']:.0f}; {self.cached} should have come from the file"
            )
        return seconds


def run(options: argparse.Namespace) -> Report:
    """Measure the time to the first token, computed and read, ours and llama.cpp's in turns."""
    from bigmodel.server.engine import EngineOptions, build_engine
    from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK

    size, model = served_llama(options)
    tokens = 3 * PROMPT_BLOCK if options.quick else options.tokens // PROMPT_BLOCK * PROMPT_BLOCK
    job = PromptJob([7 * n % 8192 for n in range(tokens + QUESTION)], 1)
    on_host = options.device == "cpu"
    peers = on_host and not options.no_peers and is_installed()
    settings: dict[str, Any] = {"size": size, "tokens": len(job.prompt)}
    notes = [MISSING] if on_host and not peers else []
    with contextlib.ExitStack() as stack:
        folder, slots = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bigmodel-{name}-", dir=options.workdir)))
            for name in ("prefix", "slots")
        )

        def engine(where: Path | None) -> Engine:
            of_engine = EngineOptions(max_sequences=1, kv_bytes=1 << 30, prefix_folder=where)
            return build_engine(model, word_tokenizer(), options=of_engine, checkpoint=size)

        writer = Started(lambda: engine(folder), job, 0)
        writer.prepare()
        writer.run()
        writer.stop()
        files = list(folder.rglob("*.safetensors"))
        settings["bytes"] = sum(file.stat().st_size for file in files)
        ours = {
            COMPUTED: Started(lambda: engine(None), job, 0),
            READ: Started(lambda: engine(folder), job, tokens),
            EVICTED: Started(lambda: engine(folder), job, tokens, lambda: evict(files)),
        }
        for each in ours.values():
            stack.callback(each.stop)
        theirs: dict[str, Slot] = {}
        if peers:
            server = _peer(size, options, len(job.prompt) + 1, slots)
            theirs = {PEER_COMPUTED: Slot(server, job.prompt, 0), PEER_RESTORED: Slot(server, job.prompt, tokens)}
            theirs[PEER_RESTORED].save()
            settings[f"bytes of {PEER}"] = (slots / Slot.FILE).stat().st_size
            notes = [
                f"{PEER} is compared with its own computing",
                f"{PEER} keeps keys and values in float16, in half the bytes of ours",
                f"{PEER} is that of {build()}",
            ]
        variants = [Variant(name, way.run, way.prepare) for name, way in (ours | theirs).items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    bases = dict.fromkeys(ours, COMPUTED) | dict.fromkeys(theirs, PEER_COMPUTED)
    rows: list[list[Any]] = [
        [name, samples.median(name), samples.ratio(base, name).median] for name, base in bases.items()
    ]
    columns = [Column("prompt"), Column("first token", "seconds"), Column("sooner", "ratio")]
    return Report(
        "prefix_folder",
        options.device,
        settings=settings,
        tables=[Table(f"A Llama of {size}, {len(job.prompt)} tokens of prompt", columns, rows)],
        limits=[] if options.quick else limits(samples),
        notes=notes,
        samples={"": samples},
    )


def limits(samples: Samples) -> list[Limit]:
    """Return the limits on our files over computing, and over llama.cpp's file if that was measured."""
    found = [
        Limit(f"first token computed over {name}", samples.ratio(COMPUTED, name).median, ">=", GAIN)
        for name in (READ, EVICTED)
    ]
    if PEER_RESTORED in samples.values:
        over = samples.ratio(READ, PEER_RESTORED).median
        found.append(Limit(f"first token {READ} over {PEER_RESTORED}", over, "<=", PEER_RATIO))
    return found


def _peer(size: str, options: argparse.Namespace, context: int, slots: Path) -> LlamaServer:
    """Return llama.cpp with the weights of our model, and as many threads as we compute with."""
    import torch

    from .gguf_writer import gguf_of
    from .serve_peer import checkpoint

    path = gguf_of(checkpoint(options.workdir / "serve", size, options.seed))
    return LlamaServer(path, context=context, threads=torch.get_num_threads(), saved=slots)
