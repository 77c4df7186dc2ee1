"""How much higher is the throughput of sixteen streams than of one, for a model whose weights are streamed?

Every step fetches the streamed weights once, for all its sequences. A virtual accelerator's link is slower than the
compute, as for a model larger than its accelerator; on CUDA the link is the machine's.
"""

from __future__ import annotations

import argparse
from typing import Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .harness.devices import first_device, is_virtual
from .serve_model import PromptJob, random_llama, run_jobs, started_engine

ONE, MANY = "one stream", "sixteen streams"

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--tokens", type=int, default=12, help="tokens a stream")
    parser.add_argument("--bandwidth", type=float, default=0.25e9, help="bytes a second of the virtual link")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure the tokens per second of one stream and of sixteen."""
    from bigmodel.devices import virtual

    virtually = is_virtual(options.device)
    size = options.size or ("2x64" if options.quick else "4x512" if virtually else "16x2048")
    if virtually:
        virtual.enable(count=1, capacity="2GiB", bandwidth=options.bandwidth)
    engine = started_engine(
        streamed_model(size, options.seed, first_device(options.device)), max_sequences=16, prefix_cache=False
    )
    jobs = [PromptJob([number + 1] * 4, options.tokens) for number in range(16)]
    variants = [
        Variant(ONE, lambda: run_jobs(engine, jobs[:1])[0] / options.tokens),
        Variant(MANY, lambda: run_jobs(engine, jobs)[0] / (16 * options.tokens)),
    ]
    try:
        samples = measure(variants, options.rounds, seed=options.seed)
    finally:
        engine.stop()
    gain = samples.ratio(ONE, MANY).median
    table = Table(
        f"A Llama of {size}, its layers streamed" + (f" at {options.bandwidth / 1e9:g} GB/s" if virtually else ""),
        [Column("streams"), Column("tokens/s", "count")],
        [[name, 1 / samples.median(name)] for name in (ONE, MANY)],
    )
    limits = [] if options.quick else [Limit("tokens/s of sixteen streams over one", gain, ">=", 8)]
    settings: dict[str, Any] = {"size": size, "tokens": options.tokens, "bandwidth": options.bandwidth}
    return Report(
        "serve_streamed", options.device, settings=settings, tables=[table], limits=limits, samples={"token": samples}
    )


def streamed_model(size: str, seed: int, device: str) -> Any:
    """A Llama whose layers lie in host memory and run on ``device``: bfloat16 on CUDA, else float32."""
    import torch

    from bigmodel.dispatch import dispatch_model

    model = random_llama(size, seed, torch.bfloat16 if device.startswith("cuda") else None)
    layers = {f"model.layers.{index}": "cpu" for index in range(model.config.num_hidden_layers)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), device)
    return dispatch_model(model, {**rest, **layers}, main_device=device)
