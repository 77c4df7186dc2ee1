"""Link bandwidths: those to set on a virtual accelerator, and the measured one of a real accelerator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from .harness import elapsed


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add the option for bandwidths of the virtual link."""
    parser.add_argument("--link", type=float, action="append", help="GB/s of the virtual link; may be repeated")


def link_rates(options: argparse.Namespace, usual: Sequence[float]) -> list[float | None]:
    """Return the bandwidths to run in bytes per second: those given, else `usual`, of which a quick run uses one.

    None stands for the link of the machine, if the device is not virtual.
    """
    if options.device != "virtual":
        return [None]
    if options.link:
        return [rate * 1e9 for rate in options.link]
    return list(usual[:1] if options.quick else usual)


def pinned_rate(nbytes: int, device: str) -> float:
    """Return the bytes per second of a copy of `nbytes` from pinned memory to `device`: the best of ten."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copy = partial(target.copy_, source, non_blocking=True)
    return nbytes / min(elapsed(copy, device) for _ in range(10))
