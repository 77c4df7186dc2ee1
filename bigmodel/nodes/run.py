"""`run_over_nodes`: what each process of a launch over nodes calls."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ..dispatch import from_pretrained
from ..errors import LaunchError
from ..plan import NodesPlan, Stage
from ..profile.machine.machine import LinkSpeed
from .caches import NumberedCaches
from .messages import Peer
from .ring import Ring, connect_ring
from .stages import RunningStage

Result = TypeVar("Result")


def run_over_nodes(
    checkpoint: str | Path, plan: NodesPlan, main: Callable[[nn.Module], Result], slow_links: bool = False
) -> Result | None:
    """Load this process's stage of a model and run it; on the first node, call `main` with the model.

    Call it in every process of `torchrun` or `bigmodel launch`, as many as the plan has stages. Process 0 has the
    first stage: `main` gets a model whose `generate` and calls run all stages, with the bits of one process. The other
    processes follow until `main` returns.

    If a process ends, calls of the model raise NodeLostError, and so does this function in the processes that are left:
    let it end them, and the launcher (`--max-restarts`) starts all of them again.

    Args:
        checkpoint: the folder or Hub id of the model, on each node: a copy of its own or a shared one. Only weights of
            the stage are read.
        plan: the plan for the nodes.
        main: what is done with the model.
        slow_links: messages take as long as the plan's links take, to try these on one host.

    Returns:
        what `main` returned on the first node; None on the others.

    Raises:
        LaunchError: there are not as many processes as stages, or none were launched.
        NodeLostError: a process of another stage is gone.
    """
    stage = this_stage(plan, slow_links)
    ring = stage.meet()
    model = from_pretrained(checkpoint, device_map=stage.stage.plan, layers=(stage.stage.start, stage.stage.stop))
    running = stage.run(model, ring)
    if stage.rank:
        with torch.inference_mode():
            running.follow()
        return None
    result = main(model)
    running.stop_others()
    return result


@dataclass(frozen=True)
class ThisStage:
    """The stage of this process in a plan.

    Attributes:
        plan: the plan for the nodes.
        rank: the number of this process, and of its stage.
        slow_links: messages take as long as the plan's links take.
    """

    plan: NodesPlan
    rank: int
    slow_links: bool = False

    @property
    def stage(self) -> Stage:
        """The stage as planned."""
        return self.plan.stages[self.rank]

    def meet(self) -> Ring | None:
        """Wait until the processes of all stages are there, and return the connections to those beside this one; None
        for a single stage.

        Raises:
            NodeLostError: another process is gone.
        """
        count = len(self.plan.stages)
        return connect_ring(self.rank, count) if count > 1 else None

    def run(self, model: nn.Module, ring: Ring | None, caches: NumberedCaches | None = None) -> RunningStage:
        """Return the loaded stage, connected to the others.

        Args:
            model: what was loaded.
            ring: what `meet` returned.
            caches: keys and values of stages that follow; None: those of transformers.
        """
        stage, own = self.stage, caches or NumberedCaches()
        if ring is None:
            return RunningStage(model, stage.start, stage.stop, None, None, None, own)
        last = len(self.plan.stages) - 1
        crossing = self.plan.crossings[self.rank]
        link = LinkSpeed(crossing.rate, crossing.latency) if self.slow_links else None
        behind = self._peer(self.rank + 1, ring.behind, link)
        before = self._peer(self.rank - 1, ring.before, None)
        if self.rank == 0:
            return RunningStage(model, stage.start, stage.stop, None, behind, before, own)
        if self.rank == last:
            return RunningStage(model, stage.start, stage.stop, before, None, behind, own)
        return RunningStage(model, stage.start, stage.stop, before, behind, None, own)

    def _peer(self, rank: int, connection: socket.socket, link: LinkSpeed | None) -> Peer:
        rank %= len(self.plan.stages)
        return Peer(rank, self.plan.stages[rank].node, connection, link)


def this_stage(plan: NodesPlan, slow_links: bool = False) -> ThisStage:
    """Return the stage that this process has by the environment of its launcher.

    Raises:
        LaunchError: there are not as many processes as stages, or none were launched.
    """
    stages = plan.stages
    if len(stages) > 1 and "WORLD_SIZE" not in os.environ:
        raise LaunchError(
            f"the plan has {len(stages)} stages: start as many processes with torchrun or bigmodel launch"
        )
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count != len(stages):
        raise LaunchError(f"the plan has {len(stages)} stages, and {count} processes were started: start one for each")
    return ThisStage(plan, rank, slow_links)
