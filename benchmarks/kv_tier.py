"""Does a step whose keys and values lie on the host, or on disk, take no longer than its compute, or its bytes, need?

A Llama generates at a context of which the accelerator's budget holds a quarter of the keys and values beside the
weights, so the plan has most layers' in RAM and fetches them ahead of use. A virtual link has a set bandwidth, a real
one its own for pinned memory. The bound is the larger of two times: of the same step with everything on the
accelerator, and of the bytes of streamed weights and fetched keys and values over the link. A third plan lacks three
quarters of the RAM that these take, too, so that older ones are on disk: its bound is also the time in which its bytes
on disk are read alone, by as many threads; once as the disk reads them, and once by a disk that is slower than the
link. All of it is measured of a step of `generate`, whose cache is of transformers, and of one of the server's engine,
whose keys and values are in pages. In the same rounds transformers' own offloaded cache is measured, of a model on the
accelerator: it fetches and offloads all keys and values of each layer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigmodel.limits import CHUNK_BYTES, KV_PAGE, STAGING_BYTES

from .harness import BenchmarkError, Column, Limit, Report, Summary, Table, Variant, elapsed, measure
from .harness.devices import first_device
from .harness.report import Cell
from .harness.slow_disk import slow_disk
from .kv_texts import OffloadedText, ServedText, Sizes, Text, make
from .links import pinned_rate

if TYPE_CHECKING:
    from bigmodel.plan import Plan
    from bigmodel.profile import Profile

MOST = 1.05
"""The most that a step may take of its bound."""

SLOWER = 1.5
"""How many times as long a slow disk reads as the link takes."""

HELD = 0.25
"""Share of the keys and values that the accelerator's budget holds."""

ON_DEVICE, ON_HOST = "all on the accelerator", "keys and values as planned"
ON_DISK, OF_SLOW = "older keys and values on disk", ", a slow one"
SERVED_ON_DEVICE, SERVED_ON_HOST, SERVED_ON_DISK = (f"server, {name}" for name in (ON_DEVICE, ON_HOST, ON_DISK))
OFFLOADED = "transformers' offloaded cache"
ALONE = {
    ON_HOST: ON_DEVICE,
    ON_DISK: ON_DEVICE,
    SERVED_ON_HOST: SERVED_ON_DEVICE,
    SERVED_ON_DISK: SERVED_ON_DEVICE,
}
"""Of each step the one that has its compute alone."""

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=None, help="steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure steps with all keys and values on the accelerator, and as planned, in the same rounds."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    device = first_device(options.device)
    if options.device == "cuda":
        rate = pinned_rate(64 * 2**20, device)
        sizes = Sizes(16, 64, 8192, rate, 1, device) if options.quick else Sizes(16, 2048, 32768, rate, 3, device)
    else:
        sizes = Sizes(10, 64, 4096, 3e8, 1, device) if options.quick else Sizes(12, 256, 8192, 2e8, 3, device)
        virtual.enable(1, bandwidth=sizes.rate)
    sizes = replace(sizes, steps=options.steps or sizes.steps)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            return compared(options, sizes, Path(folder))
        finally:
            if options.device == "virtual":
                virtual.disable()


def compared(options: argparse.Namespace, sizes: Sizes, folder: Path) -> Report:
    """Return the report of steps; `folder` is for keys and values on disk."""
    import torch

    from bigmodel.dispatch import dispatch_model

    profile = profile_of(sizes)
    found, served = planned(profile, sizes), planned(profile, sizes, per_pass=False)
    deeper, deeper_served = planned(profile, sizes, True), planned(profile, sizes, True, per_pass=False)
    in_ram = deeper_served.kv_in_ram // KV_PAGE * KV_PAGE
    pages = ServedText(dispatch_model(make(sizes), deeper_served, offload_dir=folder), sizes, in_ram)
    texts: dict[str, Text] = {
        ON_DEVICE: Text(dispatch_model(make(sizes), {"": 0}), sizes),
        ON_HOST: Text(dispatch_model(make(sizes), found), sizes),
        ON_DISK: Text(dispatch_model(make(sizes), deeper, offload_dir=folder), sizes),
        SERVED_ON_DEVICE: ServedText(dispatch_model(make(sizes), {"": 0}), sizes),
        SERVED_ON_HOST: ServedText(dispatch_model(make(sizes), served), sizes),
        SERVED_ON_DISK: pages,
        OFFLOADED: OffloadedText(make(sizes).to(sizes.device), sizes),
    }
    one, other, from_disk, from_device, from_host, from_pages, offloaded = (text.logits() for text in texts.values())
    link = {name: sum(bytes_of(each, profile)) / sizes.rate for name, each in ((ON_HOST, found), (ON_DISK, deeper))}
    link[SERVED_ON_HOST] = sum(bytes_of(served, profile)) / sizes.rate
    link[SERVED_ON_DISK] = sum(bytes_of(deeper_served, profile)) / sizes.rate
    there = {ON_DISK: deeper.kv_on_disk, SERVED_ON_DISK: pages.on_disk}
    slow = min(there.values()) / (SLOWER * max(link.values()))
    variants = [Variant(name, partial(text.seconds, sizes.steps)) for name, text in texts.items()]
    variants += [Variant(f"{name}{OF_SLOW}", partial(on_slow_disk, texts[name], sizes.steps, slow)) for name in there]
    samples = measure(variants, options.rounds, seed=options.seed)
    rate = read_rate(folder, deeper.kv_on_disk, deeper.readers)
    steps = {variant.name: samples.summary(variant.name) for variant in variants}
    bounds = {
        **{name: {"compute": steps[ALONE[name]].median, "link": seconds} for name, seconds in link.items()},
        **{
            name: {"compute": steps[ALONE[name]].median, "link": link[name], "disk": there[name] / rate}
            for name in there
        },
        **{
            f"{name}{OF_SLOW}": {"compute": steps[ALONE[name]].median, "link": link[name], "disk": there[name] / slow}
            for name in there
        },
    }
    rows = [_row(name, step, bounds.get(name, {})) for name, step in steps.items()]
    return Report(
        "kv_tier",
        options.device,
        settings={
            **vars(sizes),
            "threads": torch.get_num_threads(),
            "slow_disk": slow,
            **{f"bytes on disk, {name}": nbytes for name, nbytes in there.items()},
        },
        tables=[
            Table(
                f"{sizes.context:,} tokens of context, keys and values of {len(found.kv_on_host)} of {sizes.layers} "
                f"layers on the host; of a server of {len(served.kv_on_host)}",
                [
                    Column("step"),
                    *(Column(name, "seconds") for name in ("median", "q1", "q3")),
                    *(Column(name, "seconds") for name in ("bytes over the link", "bytes on disk")),
                ],
                rows,
            )
        ],
        limits=[
            *(
                Limit(
                    f"{name}: step over the largest of its bounds", steps[name].median / max(bound.values()), "<=", MOST
                )
                for name, bound in bounds.items()
            ),
            Limit("logits that differ from those of the accelerator's own cache", float((one != other).sum()), "==", 0),
            Limit("logits that differ by transformers' offloaded cache", float((one != offloaded).sum()), "==", 0),
            Limit("logits that differ with older ones on disk", float((one != from_disk).sum()), "==", 0),
            Limit("logits of the server that differ", float((from_device != from_host).sum()), "==", 0),
            Limit(
                "logits of the server that differ with pages on disk", float((from_device != from_pages).sum()), "==", 0
            ),
        ],
        samples={"steps": samples},
    )


def _row(name: str, step: Summary, bound: Mapping[str, float]) -> list[Cell]:
    return [name, step.median, step.first_quartile, step.third_quartile, bound.get("link"), bound.get("disk")]


def on_slow_disk(text: Text, steps: int, rate: float) -> float:
    """Return the mean seconds of steps whose files are read at a rate."""
    with slow_disk(rate):
        return text.seconds(steps)


def profile_of(sizes: Sizes) -> Profile:
    """Return the profile of a short prompt and a long text after it."""
    import torch

    from bigmodel.profile import profile_model

    return profile_model(
        make(sizes),
        context_length=sizes.context,
        new_tokens=sizes.context - 16,
        device_type=torch.device(sizes.device).type,
        padded=False,
    )


def bytes_of(found: Plan, profile: Profile) -> tuple[int, int]:
    """Return the bytes of keys and values that cross the link in a step, and those of weights."""
    there = set(found.kv_on_host)
    fetched = sum(profile.kv_cache[at] for at, unit in enumerate(profile.units) if unit.name in there)
    return fetched, sum(part.bytes for part in found.streamed)


def read_rate(folder: Path, nbytes: int, readers: int) -> float:
    """Return the bytes per second at which `readers` threads read a file of `nbytes` in chunks: the best of three."""
    buffers = [bytearray(CHUNK_BYTES) for _ in range(readers)]
    with tempfile.TemporaryFile(dir=folder) as file:
        for begin in range(0, nbytes, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, nbytes - begin)))
        file.flush()

        def read(number: int) -> None:
            for begin in range(number * CHUNK_BYTES, nbytes, readers * CHUNK_BYTES):
                os.preadv(file.fileno(), [buffers[number]], begin)

        def whole() -> None:
            with ThreadPoolExecutor(readers) as threads:
                list(threads.map(read, range(readers)))

        return nbytes / min(elapsed(whole, "cpu") for _ in range(3))


def planned(profile: Profile, sizes: Sizes, on_disk: bool = False, per_pass: bool = True) -> Plan:
    """Return the plan under a budget that lacks three quarters of the bytes of keys and values; with `on_disk`, under
    one of the RAM that lacks as many of those that would lie there.

    Raises:
        BenchmarkError: it has no keys and values on the host, or on disk.
    """
    from bigmodel.plan import plan

    planning = partial(plan, profile, per_pass=per_pass)
    whole = planning({0: 2**40, "cpu": 2**40}).devices[0].total
    budget = whole - int((1 - HELD) * sum(profile.kv_cache))
    found = planning({0: budget, "cpu": 2**40})
    if on_disk:
        host = found.devices["cpu"]
        staged = min(max(profile.kv_cache), STAGING_BYTES)
        found = planning({0: budget, "cpu": int(host.total - (1 - HELD) * host.kv_cache + staged)})
        if not found.kv_on_disk:
            raise BenchmarkError("the plan has all keys and values in RAM")
    if not found.kv_on_host:
        raise BenchmarkError("the plan has all keys and values on the accelerator")
    return found
