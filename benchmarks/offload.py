"""How fast does a model decode whose weights are streamed from host memory, beside pinned copies and accelerate?

All weights of a Llama lie in host memory and cross the link in every step, so the lower bound of a step is a copy of as
many bytes from pinned memory. The same model resident on the accelerator shows what its compute takes, and says which
bits the streamed one must give. accelerate's `cpu_offload` runs in the same rounds, on CUDA.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.devices import first_device, is_virtual
from .harness.report import Cell

if TYPE_CHECKING:
    from torch import nn

OURS, RESIDENT, COPIES, ACCELERATE = "bigmodel, streamed", "resident", "pinned copies alone", "accelerate, cpu_offload"
LINK = 4e9
OF_THE_LINK = 0.9
LOGITS = 3
"""Decode steps whose logits are compared."""

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048 (CUDA's), 8x1024, 4x512, 2x64")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.add_argument("--link", type=float, default=LINK / 1e9, help="GB/s of the virtual link")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure decode steps and copies in the same rounds, and compare the logits."""
    import torch

    from bigmodel.devices import virtual

    from .serve_model import random_llama
    from .steps import Decoder

    device, virtually = first_device(options.device), is_virtual(options.device)
    if virtually:
        torch.set_num_threads(options.threads or 1)
        virtual.enable(count=1, bandwidth=options.link * 1e9)
    size = options.size or ("2x64" if options.quick else "8x1024" if virtually else "16x2048")
    model = random_llama(size, options.seed, torch.float32 if virtually else torch.bfloat16)
    models = _models(model, device, peers=not virtually)
    decoders = {name: Decoder(each, device) for name, each in models.items()}
    differing = _differing(decoders)
    nbytes = _bytes_of_a_step(models[OURS], decoders[OURS])
    variants = [Variant(name, partial(one.seconds_per_step, options.steps)) for name, one in decoders.items()]
    copies = pinned_copies(nbytes, nbytes // model.config.num_hidden_layers, device)
    variants.append(Variant(COPIES, partial(elapsed, copies, device)))
    samples = measure(variants, options.rounds, seed=options.seed)
    return _report(options, size, samples, nbytes, differing)


def _models(model: Any, device: str, peers: bool) -> dict[str, nn.Module]:
    """Return the model in each variant; `model` itself is left on the host."""
    from bigmodel.dispatch import dispatch_model

    found: dict[str, nn.Module] = {
        RESIDENT: copy.deepcopy(model).to(device),
        OURS: dispatch_model(copy.deepcopy(model), {"": "cpu"}, main_device=device),
    }
    if peers:  # accelerate cannot put a tensor on an accelerator that is written in Python
        import torch
        from accelerate import cpu_offload

        found[ACCELERATE] = cpu_offload(copy.deepcopy(model), execution_device=torch.device(device))
    return found


def _differing(decoders: dict[str, Any]) -> dict[str, int]:
    """Return how many logits of the first steps differ in any bit from those of the resident model."""
    expected = decoders[RESIDENT].logits(LOGITS)
    return {name: int((each.logits(LOGITS) != expected).sum()) for name, each in decoders.items() if name != RESIDENT}


def _bytes_of_a_step(model: Any, decoder: Any) -> int:
    """Return the bytes that one decode step copies from host memory."""

    def copied() -> int:
        return int(next(iter(model.dispatch_stats().values()))["bytes_from_ram"])

    decoder.start()
    before = copied()
    decoder.step()
    return copied() - before


def pinned_copies(nbytes: int, chunk: int, device: str) -> Callable[[], None]:
    """Return a function that queues copies of `nbytes` bytes from pinned memory to `device`, `chunk` at a time."""
    import torch

    from bigmodel.devices.pinned import empty_host

    source = empty_host(chunk, pin=True)
    targets = [torch.empty(chunk, dtype=torch.uint8, device=device) for _ in range(2)]
    lengths = [chunk] * (nbytes // chunk) + [nbytes % chunk]

    def copy_all() -> None:
        for number, length in enumerate(lengths):
            targets[number % 2][:length].copy_(source[:length], non_blocking=True)

    return copy_all


def _report(options: argparse.Namespace, size: str, samples: Samples, nbytes: int, differing: dict[str, int]) -> Report:
    columns = [Column("variant"), Column("step", "seconds"), Column("tokens/s"), Column("rate", "rate")]
    columns += [Column("over pinned copies", "ratio"), Column("logits that differ", "count")]
    rows: list[list[Cell]] = []
    for name in samples.values:
        step, streams = samples.median(name), name != RESIDENT
        rate, over = (nbytes / step, samples.ratio(name, COPIES).median) if streams else (None, None)
        tokens = None if name == COPIES else f"{1 / step:.1f}"
        rows.append([name, step, tokens, rate, over, differing.get(name)])
    limits = [Limit("logits that differ from the resident model's", differing[OURS], "==", 0, "count")]
    if not options.quick:
        used = samples.median(COPIES) / max(samples.median(OURS), samples.median(COPIES))
        bound = max(samples.median(COPIES), samples.median(RESIDENT))
        over = samples.median(OURS) / bound
        limits += [
            Limit("a step over the longer of pinned copies and resident step", over, "<=", 1 / OF_THE_LINK),
            Limit("rate over that of pinned copies", used, ">=", OF_THE_LINK),
        ]
    if ACCELERATE in samples.values:
        limits.append(Limit("a step over accelerate's", samples.ratio(OURS, ACCELERATE).median, "<=", 1.0))
    return Report(
        "offload",
        options.device,
        settings={"size": size, "bytes": nbytes, "steps": options.steps, "link": options.link * 1e9},
        tables=[Table(f"A decode step of a Llama of {size}: {nbytes:,} bytes streamed", columns, rows)],
        limits=limits,
        samples={"step": samples},
    )
