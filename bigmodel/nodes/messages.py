"""Messages between stages: a few values and tensors, over the process group, at the speed of the link if one is set."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..errors import NodeLostError
from ..profile.machine.machine import LinkSpeed

logger = logging.getLogger(__name__)


class Peer:
    """The process of another stage.

    Args:
        rank: its rank.
        node: the name of its node, for messages.
        link: sends take as long as on this link, which is how slow links are tried on one host; None: as long as they
            take.
    """

    def __init__(self, rank: int, node: str, link: LinkSpeed | None = None) -> None:
        self.rank, self.node, self._link = rank, node, link

    def send(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Send JSON values and tensors of any device; names are kept.

        Raises:
            NodeLostError: the process is gone.
        """
        began = time.perf_counter()
        data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        shapes = {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in data.items()}
        head = torch.frombuffer(bytearray(json.dumps([dict(values), shapes]).encode()), dtype=torch.uint8)
        # As bytes: gloo does not know every dtype.
        pieces = [torch.tensor([head.numel()]), head]
        pieces += [each.view(-1).view(torch.uint8) for each in data.values() if each.numel()]
        if self._link is not None:
            wanted = self._link.seconds(sum(each.nbytes for each in data.values()))
            time.sleep(max(wanted - (time.perf_counter() - began), 0.0))
        try:
            for piece in pieces:
                dist.send(piece, dst=self.rank)
        except RuntimeError as error:
            raise self._gone(error) from error

    def receive(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Wait for a message; return its values and tensors, on the host.

        Raises:
            NodeLostError: the process is gone.
        """
        try:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, src=self.rank)
            head = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(head, src=self.rank)
            values, shapes = json.loads(bytes(head.tolist()))
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}
            for tensor in tensors.values():
                if tensor.numel():
                    dist.recv(tensor.view(-1).view(torch.uint8), src=self.rank)
        except RuntimeError as error:
            raise self._gone(error) from error
        return values, tensors

    def _gone(self, error: RuntimeError) -> NodeLostError:
        logger.debug("rank %d: %s", self.rank, error)
        return NodeLostError(
            f"node {self.node!r} (rank {self.rank}) no longer answers, or one before it does not: requests that run "
            "are ended, and the launcher starts the deployment again"
        )
