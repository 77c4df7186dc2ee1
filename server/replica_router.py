"""Which replica a request goes to. Imported by Ray Serve's proxies, so only where Ray is installed."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class FewestRequests(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """To the replica with the fewest requests, on whichever machine it is.

    Serve's own router fills the replicas beside the proxy to their queues' ends before it tries another machine's:
    right where a hop is dear beside a request, wrong where a request keeps a whole model busy for seconds.
    """

    async def choose_replicas(
        self, candidate_replicas: Seq[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them as one rank, of which Serve takes the one with the shortest queue; any among equals."""
        return [random.sample(list(candidate_replicas), len(candidate_replicas))]
