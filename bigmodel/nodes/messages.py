"""Messages between stages: a few values and tensors over a connection, at the speed of a link if one is set."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import NodeLostError
from ..profile.machine.machine import LinkSpeed

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("<QQ")
"""What a message begins with: the bytes behind this, and those of its JSON."""


def _memory(data: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of uint8 on the host."""
    array: Any = data.numpy()
    return memoryview(array)


class Peer:
    """The process of another stage, which messages go to or come from.

    Args:
        rank: its rank.
        node: the name of its node, for errors.
        connection: the connection to it.
        link: sends take as long as on this link, which is how slow links are tried on one host; None: as long as they
            take.
    """

    def __init__(self, rank: int, node: str, connection: socket.socket, link: LinkSpeed | None = None) -> None:
        self.rank, self.node, self._connection, self._link = rank, node, connection, link

    def send(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Send JSON values and tensors of any device; names are kept.

        Raises:
            NodeLostError: the process is gone.
        """
        data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        began = time.perf_counter()  # tensors of an accelerator are waited for until they are computed
        shapes = {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in data.items()}
        head = json.dumps([dict(values), shapes]).encode()
        contents = [_memory(each.view(-1).view(torch.uint8)) for each in data.values() if each.numel()]
        nbytes = sum(map(len, contents))
        message = b"".join([_LENGTHS.pack(len(head) + nbytes, len(head)), head, *contents])
        if self._link is not None:
            time.sleep(max(self._link.seconds(nbytes) - (time.perf_counter() - began), 0.0))
        try:
            self._connection.sendall(message)
        except OSError as error:
            raise self._gone(error) from error

    def receive(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Wait for a message; return its values and tensors, on the host.

        Raises:
            NodeLostError: the process is gone.
        """
        total, length = _LENGTHS.unpack(bytes(self._read(_LENGTHS.size).numpy()))
        message = self._read(total)
        values, shapes = json.loads(bytes(message[:length].numpy()))
        tensors: dict[str, torch.Tensor] = {}
        at = length
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).copy_(message[at : at + tensor.nbytes])
            at += tensor.nbytes
        return values, tensors

    def close(self) -> None:
        """Close the connection, which ends the waiting of the other process."""
        self._connection.close()

    def _read(self, nbytes: int) -> torch.Tensor:
        """Return the next bytes as uint8."""
        found = torch.empty(nbytes, dtype=torch.uint8)
        left = _memory(found)
        while left:
            try:
                count = self._connection.recv_into(left)
            except OSError as error:
                raise self._gone(error) from error
            if not count:
                raise self._gone("it has closed the connection")
            left = left[count:]
        return found

    def _gone(self, reason: object) -> NodeLostError:
        logger.debug("rank %d: %s", self.rank, reason)
        return NodeLostError(
            f"node {self.node!r} (rank {self.rank}) no longer answers, or one before it does not: requests that run "
            "are ended, and the launcher starts the deployment again"
        )
