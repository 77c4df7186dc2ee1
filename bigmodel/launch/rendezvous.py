"""A new store for each attempt of a launch, so that restarted processes find no stale addresses.

torch's agent keeps one store for its lifetime, through which its processes meet. Keys written before a failure remain
after a restart, so gloo would connect to dead processes. Only the first attempt uses the agent's store; for every
later attempt, the first process opens a store on a free port.
"""

from __future__ import annotations

import os
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

BACKEND = "static-anew"
"""Name under which the rendezvous is registered with torch."""


class StaticAnewRendezvous(StaticTCPRendezvous):
    """Static rendezvous of machines whose processes meet at a new port from the second attempt on."""

    _attempts = 0

    def get_backend(self) -> str:
        """Return `BACKEND`."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes of the present attempt meet through the agent's store."""
        return self._attempts <= 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rendezvous of the next attempt's processes, once every machine has joined it."""
        found = super().next_rendezvous()
        self._attempts += 1
        if self.use_agent_store:
            return found
        store = PrefixStore(f"attempt_{self._attempts}", found.store)
        place = RendezvousStoreInfo.build(found.rank, store, local_addr=self.master_addr)
        return RendezvousInfo(store, found.rank, found.world_size, place)


def register() -> None:
    """Register the rendezvous with torch."""
    registry.register(BACKEND, _create)


def stores_anew(config: Any) -> dict[str, str]:
    """Let the processes of `config`, torch's LaunchConfig, meet in a new store after each restart.

    Returns:
        Environment variables that the agent needs for that.
    """
    if not config.max_restarts:
        return {}
    if config.rdzv_backend == "static":
        register()
        config.rdzv_backend = BACKEND
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")}


def _create(params: RendezvousParameters) -> StaticAnewRendezvous:
    plain = cast(StaticTCPRendezvous, create_rdzv_handler(params))
    seconds = int(plain.timeout.total_seconds())
    return StaticAnewRendezvous(
        plain.master_addr, plain.master_port, plain.rank, plain.world_size, plain.run_id, seconds
    )
