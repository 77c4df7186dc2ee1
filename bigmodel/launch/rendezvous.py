"""A store of its own for each attempt of a launch, so that processes started anew find none of the addresses of old.

torch's agent keeps one store for its whole life, and its processes meet through that. What they wrote there before a
failure is still there after a restart: gloo then connects to processes that are dead. The agent's own store is used
for the first attempt alone; for each further one the first process opens a store, on a port that is free.
"""

from __future__ import annotations

import os
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

BACKEND = "static-anew"
"""The name of this rendezvous among torch's backends."""


class StaticAnewRendezvous(StaticTCPRendezvous):
    """Machines that meet at a fixed address, and their processes, from the second attempt on, at a new port of it."""

    _attempts = 0

    def get_backend(self) -> str:
        """Return `BACKEND`."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes of the present attempt meet through the agent's store."""
        return self._attempts <= 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Return where the processes of the next attempt meet, once every machine has come to it."""
        found = super().next_rendezvous()
        self._attempts += 1
        if self.use_agent_store:
            return found
        store = PrefixStore(f"attempt_{self._attempts}", found.store)
        place = RendezvousStoreInfo.build(found.rank, store, local_addr=self.master_addr)
        return RendezvousInfo(store, found.rank, found.world_size, place)


def register() -> None:
    """Make the rendezvous known to torch."""
    registry.register(BACKEND, _create)


def stores_anew(config: Any) -> dict[str, str]:
    """Let the processes of `config`, torch's LaunchConfig, meet in a new store after each restart.

    Returns:
        What has to be in the environment of the agent for that.
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
