"""Choose the replica for a request. Imported by Ray Serve's proxies; needs Ray."""

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
    """Routes to the replica with the fewest requests, on any machine.

    Ray Serve's own router fills the queues of replicas on the proxy's machine before it tries another machine: right
    where a network hop is expensive relative to a request, wrong where a request occupies a whole model for seconds.
    """

    async def choose_replicas(
        self, candidate_replicas: Seq[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas as one rank, in random order: Serve takes the one with the shortest queue."""
        return [random.sample(list(candidate_replicas), len(candidate_replicas))]
