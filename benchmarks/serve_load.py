"""Do clients of other projects measure the same time to the first token under load as we do, and which?

`bigmodel serve` runs as a process of its own. The same requests are sent to it at the same times of a Poisson stream by
a client of ours that follows the protocol of `vllm bench serve`, by that command itself, and by guidellm, in rounds of
random order that have arrival times of their own. `/metrics` says what the server itself counted meanwhile.

Peers are measured if their packages are installed, or with interpreters that have them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Samples, Table, Variant, measure
from .harness.report import Cell
from .serve_load_client import (
    FIRST,
    GAP,
    MEAN,
    PER_TOKEN,
    PERCENTILES,
    TOKENS,
    Load,
    poisson_arrivals,
    send,
    server_counts,
)
from .serve_load_peers import GUIDELLM, VLLM, Peer, Target, interpreter, version
from .serve_model import VOCABULARY, word_tokenizer
from .serve_peer import OURS as SERVER
from .serve_peer import Server, checkpoint, serving

OURS = "bigmodel's client"
P95 = f"{FIRST} p95"
SERVER_MEAN, SERVER_P95, SEQUENCES = "server's mean", "server's p95", "sequences in a step"
AGREEMENT = 1.1
"""Bound on a client's mean time to the first token over the server's, of the same requests: HTTP and the client add it.

The p95 has none: where more requests come than run at once, small differences of speed become long queues, and three
runs of one client differ twofold.
"""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "clients share the host with the server, and their figures are compared with each other"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.set_defaults(rounds=3)
    parser.add_argument("--size", default=None, help="layers x hidden size: 8x1024, 4x512, 2x64 (default: 4x512)")
    parser.add_argument("--requests", type=int, default=None, help="requests of a run (default: 100)")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of each answer (default: 32)")
    parser.add_argument(
        "--request-rate", type=float, default=None, help="requests per second (default: a share of the capacity)"
    )
    parser.add_argument("--share", type=float, default=0.5, help="of the requests per second that are answered at most")
    parser.add_argument("--guidellm", metavar="PYTHON", default=None, help="interpreter that has guidellm")
    parser.add_argument("--vllm", metavar="PYTHON", default=None, help="interpreter that has vllm's client")


def run(options: argparse.Namespace) -> Report:
    """Measure the server with each client."""
    size = options.size or ("2x64" if options.quick else "4x512")
    requests = options.requests or (8 if options.quick else 100)
    tokens = options.tokens or (4 if options.quick else 32)
    peers = {
        peer: python
        for peer, given in ((VLLM, options.vllm), (GUIDELLM, options.guidellm))
        if (python := interpreter(peer.package, given)) is not None
    }
    versions = {peer.package: version(python, peer.package) for peer, python in peers.items()}
    folder = checkpoint(options.workdir / "serve-load", size, options.seed, spaced_tokenizer())
    # One thread: a core of a small machine is left to the clients.
    with serving(SERVER, folder, options.threads or 1) as server:
        server.process.send_signal(signal.SIGCONT)
        capacity = measured_capacity(server, requests, tokens, options.seed)
        rate = options.request_rate or options.share * capacity
        load = drawn_load(requests, tokens, rate, options.seed)
        target = Target(f"http://127.0.0.1:{server.port}", server.model, folder)
        variants = [
            Variant(OURS, _counted(server, load, lambda now: asyncio.run(send(server.port, server.model, now))))
        ]
        variants += [
            Variant(peer.name, _counted(server, load, _measured_by(peer, python, target)))
            for peer, python in peers.items()
        ]
        samples = measure(variants, options.rounds, warmup=0, seed=options.seed)
    return Report(
        "serve_load",
        options.device,
        settings={
            "size": size,
            "requests": requests,
            "tokens": tokens,
            "request_rate": rate,
            "capacity": capacity,
            "threads": options.threads or 1,
            **versions,
        },
        tables=tables(
            samples, f"{requests} requests at {rate:.3g} a second (capacity: {capacity:.3g}), a Llama of {size}"
        ),
        limits=[] if options.quick else [_agreement(samples, name) for name in samples.values],
        notes=_notes(peers),
        samples={"runs": samples},
    )


def spaced_tokenizer() -> Any:
    """A tokenizer of words that are numbers, whose texts are tokenized to what they were made of."""
    from tokenizers import decoders

    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def drawn_load(requests: int, tokens: int, per_second: float, seed: int) -> Load:
    """Prompts of 16 to 200 tokens that arrive as a Poisson stream."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(16, 201))] for _ in range(requests)]
    return Load(
        prompts=[" ".join(map(str, prompt)) for prompt in prompts],
        prompt_tokens=[len(prompt) for prompt in prompts],
        tokens=tokens,
        per_second=per_second,
        arrivals=poisson_arrivals(requests, per_second, seed),
        seed=seed,
    )


def measured_capacity(server: Server, requests: int, tokens: int, seed: int) -> float:
    """Requests per second that are answered when all are sent at once, by the second of two runs."""
    at_once = replace(drawn_load(requests, tokens, 1.0, seed), arrivals=[0.0] * requests)
    for _ in range(2):
        found = asyncio.run(send(server.port, server.model, at_once))
    return found[TOKENS] / tokens


def tables(samples: Samples, title: str) -> list[Table]:
    """The times to the first token, and those between tokens: medians over the rounds."""
    first = Table(
        f"Time to the first token: {title}",
        [
            Column("client"),
            *(Column(f"p{p}", "seconds") for p in PERCENTILES),
            Column("mean", "seconds"),
            Column(f"p95 over {OURS}", "ratio"),
            Column(SERVER_MEAN, "seconds"),
            Column(SERVER_P95, "seconds"),
        ],
        [
            [
                name,
                *(samples.median(name, f"{FIRST} p{p}") for p in PERCENTILES),
                samples.median(name, MEAN),
                samples.ratio(name, OURS, P95).median,
                samples.median(name, SERVER_MEAN),
                samples.median(name, SERVER_P95),
            ]
            for name in samples.values
        ],
    )
    between = Table(
        "Between tokens: the mean of each answer, and all gaps",
        [
            Column("client"),
            *(Column(f"{name} p{p}", "seconds") for name in (PER_TOKEN, GAP) for p in PERCENTILES),
            Column(TOKENS, "count"),
            Column(SEQUENCES),
        ],
        [
            [
                name,
                *(_median(samples, name, f"{figure} p{p}") for figure in (PER_TOKEN, GAP) for p in PERCENTILES),
                samples.median(name, TOKENS),
                f"{samples.median(name, SEQUENCES):.1f}",
            ]
            for name in samples.values
        ],
    )
    return [first, between]


def _median(samples: Samples, name: str, figure: str) -> Cell:
    """Return the median of a figure, or None if the client does not report it."""
    return samples.median(name, figure) if figure in samples.values[name] else None


def _counted(server: Server, load: Load, client: Callable[[Load], dict[str, float]]) -> Callable[[], dict[str, float]]:
    """Return a run of a client, of which each has the arrival times of the next seed, with what the server counted.

    The run raises BenchmarkError if the server received other tokens than those of the load.
    """
    run = iter(range(load.seed, load.seed + 1_000_000))

    def measured() -> dict[str, float]:
        seed = next(run)
        now = replace(load, seed=seed, arrivals=poisson_arrivals(len(load.prompts), load.per_second, seed))
        before = asyncio.run(server_counts(server.port))
        found = client(now)
        counts = asyncio.run(server_counts(server.port)).since(before)
        asked = (len(now.prompts), sum(now.prompt_tokens), len(now.prompts) * now.tokens)
        seen = (counts.first_tokens, counts.prompt_tokens, counts.generated)
        if seen != asked:
            raise BenchmarkError(f"requests, prompt tokens and tokens that a client sent are {seen} instead of {asked}")
        return found | {
            SERVER_MEAN: counts.first_seconds / counts.first_tokens,
            SERVER_P95: counts.first_token(0.95),
            SEQUENCES: counts.sequences / counts.steps,
        }

    return measured


def _measured_by(peer: Peer, python: str, target: Target) -> Callable[[Load], dict[str, float]]:
    return lambda load: peer.measure(python, target, load)


def _agreement(samples: Samples, name: str) -> Limit:
    """Return the limit on what a client measures beyond what the server counts of the same requests."""
    over = samples.median(name, MEAN) / samples.median(name, SERVER_MEAN)
    return Limit(f"mean time to the first token, {name} over the server's own", over, "<=", AGREEMENT)


def _notes(peers: dict[Peer, str]) -> list[str]:
    """Return what was not measured, and what differs between the clients."""
    missing = [
        f"{peer.name} was not measured: {peer.package} is not installed here, nor has --{peer.package} said where it is"
        for peer in (VLLM, GUIDELLM)
        if peer not in peers
    ]
    notes = ["the server's p95 is interpolated within the buckets of its histogram, as Prometheus does"]
    if GUIDELLM in peers:
        notes.append("guidellm makes prompts of its own, of the same lengths, and does not report single gaps")
    return [*missing, *notes]
