"""The connections of stages: each process sends to the next one, and the last one to the first.

Processes meet through the launcher's process group, and tell each other there where they listen. Messages go over
connections of their own: gloo wakes a thread for each message, which takes most of a millisecond. A process that is
killed closes its connections; a host that is gone is found out within two minutes.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..errors import NodeLostError

_PATIENCE = timedelta(days=365)
"""How long processes wait for each other in the group: while one loads, others do."""
_SECRET = 32
_ANSWER_SECONDS = 10.0
"""Seconds in which whoever connects has to show the secret."""
_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds after which, and how often, a silent host is asked whether it is there."""


@dataclass(frozen=True)
class Ring:
    """The connections of one process.

    Attributes:
        behind: to the process of the next rank, of the last one to the first.
        before: from the process of the rank before, of the first one from the last.
    """

    behind: socket.socket
    before: socket.socket


def connect_ring(rank: int, count: int) -> Ring:
    """Meet the other processes, and return the connections to those beside this one.

    Args:
        rank: number of this process.
        count: how many there are.

    Raises:
        NodeLostError: another process is gone.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_PATIENCE)
    secret = secrets.token_bytes(_SECRET)
    with _listening() as listener:
        places: list[tuple[str, int, bytes]] = [("", 0, b"")] * count
        try:
            dist.all_gather_object(places, (_own_address(rank), listener.getsockname()[1], secret))
            address, port, theirs = places[(rank + 1) % count]
            behind = socket.create_connection((address, port))
            behind.sendall(theirs)
        except (OSError, RuntimeError) as error:
            raise NodeLostError(f"the process of rank {(rank + 1) % count} cannot be reached: {error}") from error
        return Ring(_prepared(behind), _prepared(accepted(listener, secret)))


def accepted(listener: socket.socket, secret: bytes) -> socket.socket:
    """Return the first connection that shows the secret; others are closed."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_ANSWER_SECONDS)
        shown = b""
        with suppress(OSError):
            while len(shown) < len(secret) and (more := connection.recv(len(secret) - len(shown))):
                shown += more
        if secrets.compare_digest(shown, secret):
            connection.settimeout(None)
            return connection
        connection.close()


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _own_address(rank: int) -> str:
    """Return the address at which other processes reach this one: the first one's is known to all, and those of others
    are what they reach that one from."""
    first = os.environ.get("MASTER_ADDR", "localhost")
    if rank == 0:
        return first
    found = socket.getaddrinfo(first, int(os.environ.get("MASTER_PORT", "0")) or 1, type=socket.SOCK_DGRAM)
    with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[0][4])  # sends nothing
        return str(probe.getsockname()[0])


def _prepared(connection: socket.socket) -> socket.socket:
    """Have a connection send at once, and notice when the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
