"""Timing of work on a device, and the effort of a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...devices import nvml


@dataclass(frozen=True)
class Effort:
    """The sizes and repetitions of a measurement: less effort is faster and less accurate.

    Attributes:
        width: width of the square matrices of products.
        spread: bytes of matrices that are used in turn, so that none is in the cache.
        rows: rows of products and attention.
        moved: bytes of the tensors that are moved.
        at_least: minimum seconds of each timed run.
        repeats: number of timed runs for each figure.
        copied: bytes of a small and a large copy over a link.
        file: bytes of the file that is written and read.
        models: width and depth of two transformers whose times calibrate the figures: one of many small matrices, one
            of few large ones, both larger than the processor's cache.
        prompt: tokens of their prompt.
        images: side and channels of the convolved images, from the coarsest to the finest stage of a network.
    """

    width: int = 2048
    spread: int = 256 * 2**20
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
    moved: tuple[int, ...] = (2**14, 2**17, 2**20, 2**23, 2**26)
    at_least: float = 0.02
    repeats: int = 3
    copied: tuple[int, ...] = (2**16, 2**25)
    file: int = 256 * 2**20
    models: tuple[tuple[int, int], ...] = ((256, 16), (1024, 4))
    prompt: int = 128
    images: tuple[tuple[int, int], ...] = ((7, 512), (14, 256), (28, 128), (56, 64), (112, 64))


QUICK = Effort(
    64, 2**17, (1, 16), (2**12, 2**16), 0.0005, 1, (2**12, 2**18), 2**20, ((16, 2), (32, 1)), 8, ((4, 8), (8, 4))
)
"""Minimal effort for tests; the figures are not meaningful."""


def is_asynchronous(device: torch.device) -> bool:
    """Whether operations on a device are queued, and computed while the host goes on."""
    return device.type in ("cuda", "xpu")


def synchronize(device: torch.device) -> None:
    """Wait until `device`, and all others of its type that this process uses, have finished all queued work."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device.type)
        for index in range(module.device_count()):
            if device.type == "xpu" or index == device.index or nvml.has_context(index):
                module.synchronize(index)


def seconds_of(work: Callable[[], object], device: torch.device, at_least: float = 0.02, repeats: int = 5) -> float:
    """Return the seconds of one call of `work`: the minimum of several runs, as disturbances only add time.

    Args:
        work: the work to time; called once untimed first.
        device: the device it computes on.
        at_least: minimum seconds of each timed run, so that clock resolution and wake-ups do not matter.
        repeats: number of timed runs.
    """
    work()
    synchronize(device)
    calls = 1
    while True:
        taken = _time(work, calls, device)
        if taken >= at_least or calls >= 4096:
            break
        calls = min(4096, max(calls * 2, int(calls * at_least / max(taken, 1e-9))))
    runs = [taken] + [_time(work, calls, device) for _ in range(repeats - 1)]
    return min(runs) / calls


def _time(work: Callable[[], object], calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - started
