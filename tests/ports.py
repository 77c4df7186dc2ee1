"""Ports for programs that are told which one to listen on.

The system gives ports above 32767 to every outgoing connection, also to those of tests that run beside this one: a port
from there that is free now may be taken when a program binds it. These lie below, each process of a test run has a
thousand of its own, and none is given twice in a row.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from functools import cache

FIRST, EACH, PROCESSES = 12_000, 1_000, 16


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    for port in itertools.islice(_ports(), EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {EACH} ports is free")


@cache
def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    ports = list(range(FIRST + worker * EACH, FIRST + (worker + 1) * EACH))
    random.Random().shuffle(ports)
    return itertools.cycle(ports)
