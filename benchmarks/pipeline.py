"""Do disk, link and compute overlap? A step from cold files over a link, beside the slowest of the three alone.

All blocks are on disk and run on an accelerator. Before each step their file is evicted from the page cache. The lower
bound of a step is the maximum of: reading the bytes (the best raw reader of the same rounds), moving them over the
link, and computing (the model resident). Without overlap it takes their sum.

A virtual link is a copy by the processor, as is much of reading a file, and both compete with the model's compute for
cores and memory bandwidth. The same three are therefore also measured concurrently, with as little else as possible: a
thread that has the kernel page in a chunk of the file, one that copies each chunk over the link once it is in memory,
and the resident model, which waits for neither. The copies are of what was read, not of a buffer: on a virtual machine
the first access to a page that was just read may take longer than reading it, where the hypervisor has yet to map it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.devices import first_device
from .harness.pagecache import evict
from .harness.rawread import READERS, populate_pages
from .harness.report import Cell
from .links import add_link, link_rates, pinned_rate

if TYPE_CHECKING:
    from torch import nn

    from .blocks import Blocks

COMPUTE, STEP = "compute, resident", "step, from disk over the link"
AT_ONCE = "paging in, copies and compute at once"
CHUNK = 8 * 2**20
"""Bytes that are paged in and copied at once by the three that run concurrently."""
LIMIT = 1.1
LINKS = (0.5e9, 1e9, 2e9, 4e9)

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_link(parser)
    parser.set_defaults(device="virtual", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure disk, compute and the whole step in the same rounds, for each speed of the link."""
    import torch

    from .blocks import make_blocks, save_blocks

    torch.set_num_threads(options.threads or 1)
    count, width = (4, 256) if options.quick else (60, 2048)
    device = first_device(options.device)
    options.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.workdir) as folder:
        file = save_blocks(make_blocks(count, width), Path(folder))
        found = [_cell(options, file, count, width, device, rate) for rate in link_rates(options, LINKS)]
    rows = [row for row, _ in found]
    columns = [Column("link", "rate"), Column("raw disk", "rate")]
    columns += [Column(name, "seconds") for name in ("disk alone", "link alone", "compute alone", "step")]
    columns += [Column("slowest"), Column("step over slowest", "ratio"), Column("step over sum", "ratio")]
    columns += [Column("three at once", "seconds"), Column("step over three at once", "ratio")]
    worst = max(float(row[7] or 0) for row in rows)
    beside = max(float(row[10] or 0) for row in rows)
    return Report(
        "pipeline",
        options.device,
        settings={"blocks": count, "width": width, "threads": torch.get_num_threads()},
        tables=[Table(f"{count} blocks of {4 * width**2:,} bytes, all on disk, cold", columns, rows)],
        limits=[
            Limit("worst step over max(disk, link, compute)", worst, "<=", LIMIT),
            Limit("worst step over the three at once", beside, "<=", LIMIT),
        ],
        samples={f"link {row[0]:g}" if row[0] else "link": samples for row, samples in found},
    )


def _cell(
    options: argparse.Namespace, file: Path, count: int, width: int, device: str, rate: float | None
) -> tuple[list[Cell], Samples]:
    """Return the row of one link bandwidth, and its samples."""
    import torch

    from bigmodel.devices import virtual

    if rate is not None:
        virtual.enable(count=1, bandwidth=rate)
    dispatched, resident = _models(file, count, width, device)
    x = torch.linspace(-1, 1, width).reshape(1, width).to(device)
    variants = [Variant(name, partial(_read, name, file), partial(evict, [file])) for name in READERS]
    variants.append(Variant(COMPUTE, partial(_forward, resident, x, device)))
    variants.append(Variant(STEP, partial(_forward, dispatched, x, device), partial(evict, [file])))
    at_once = partial(_at_once, partial(_forward, resident, x, device), file, device)
    variants.append(Variant(AT_ONCE, at_once, partial(evict, [file])))
    samples = measure(variants, options.rounds, seed=options.seed)
    nbytes = count * 4 * width**2
    link = rate or pinned_rate(4 * width**2, device)
    disk = min(samples.median(name) for name in READERS)
    alone = {"disk": disk, "link": nbytes / link, "compute": samples.median(COMPUTE)}
    slowest = max(alone, key=lambda name: alone[name])
    step = samples.median(STEP)
    cells: list[Cell] = [link, nbytes / disk, *alone.values(), step, slowest]
    del dispatched, resident, x, variants, at_once
    if rate is not None:
        virtual.disable()
    together = samples.median(AT_ONCE)
    return [*cells, step / alone[slowest], step / sum(alone.values()), together, step / together], samples


def _models(file: Path, count: int, width: int, device: str) -> tuple[nn.Module, nn.Module]:
    """Return the blocks dispatched from their file to `device`, and the same resident there."""
    from bigmodel.dispatch import load_checkpoint_and_dispatch

    from .blocks import block_map, make_blocks

    blocks = _on_meta(count, width)
    device_map = block_map(count, range(count), "disk", "disk")
    dispatched = load_checkpoint_and_dispatch(blocks, file, device_map=device_map, main_device=device)
    return dispatched, make_blocks(count, width).to(device)


def _on_meta(count: int, width: int) -> Blocks:
    import torch

    from .blocks import Blocks

    with torch.device("meta"):
        return Blocks(count, width).eval()


def _read(name: str, file: Path) -> float:
    return elapsed(lambda: READERS[name]([file]))


def _at_once(compute: Callable[[], object], file: Path, device: str) -> float:
    """Page in `file`, copy each chunk of it to the device once it is in memory, and compute, concurrently."""
    import torch

    size = file.stat().st_size
    source = torch.from_file(str(file), size=size, dtype=torch.uint8)
    target = torch.empty(CHUNK, dtype=torch.uint8, device=device)
    staging = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) if device.startswith("cuda") else None
    paged_in: SimpleQueue[int | None] = SimpleQueue()

    def read() -> None:
        try:
            for offset in range(0, size, CHUNK):
                populate_pages(source.data_ptr() + offset, min(CHUNK, size - offset))
                paged_in.put(offset)
        finally:
            paged_in.put(None)

    def copy() -> None:
        while (offset := paged_in.get()) is not None:
            chunk = source[offset : offset + CHUNK]
            pinned = chunk if staging is None else staging[: len(chunk)].copy_(chunk)
            target[: len(chunk)].copy_(pinned)

    def all_three() -> None:
        with ThreadPoolExecutor(2) as pool:
            others: list[Future[None]] = [pool.submit(copy), pool.submit(read)]
            compute()
            for other in others:
                other.result()

    return elapsed(all_three, device)


def _forward(model: Any, x: Any, device: str) -> float:
    import torch

    with torch.inference_mode():
        return elapsed(lambda: model(x), device)
