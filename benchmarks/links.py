"""The links that weights cross: the speeds to set on a virtual accelerator, and the speed that a real one has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from .harness import elapsed


def add_link(parser: argparse.ArgumentParser) -> None:
    """Let the speeds of the virtual link be given."""
    parser.add_argument("--link", type=float, action="append", help="GB/s of the virtual link; may be repeated")


def link_rates(options: argparse.Namespace, usual: Sequence[float]) -> list[float | None]:
    """Return the speeds to try in bytes per second: those given, else the `usual` ones, of which a quick run tries one.

    None stands for the speed that the machine's own link has, where the device is not a virtual one.
    """
    if options.device != "virtual":
        return [None]
    if options.link:
        return [rate * 1e9 for rate in options.link]
    return list(usual[:1] if options.quick else usual)


def pinned_rate(nbytes: int, device: str) -> float:
    """Return bytes per second of copies of `nbytes` from pinned memory to `device`: the best of ten."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copy = partial(target.copy_, source, non_blocking=True)
    return nbytes / min(elapsed(copy, device) for _ in range(10))
