"""`run_over_nodes`: what each process of a launch over nodes calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..dispatch import from_pretrained
from ..errors import LaunchError
from ..plan import NodesPlan
from ..profile.machine.machine import LinkSpeed
from .messages import Peer
from .stages import RunningStage

Result = TypeVar("Result")


def run_over_nodes(
    checkpoint: str | Path, plan: NodesPlan, main: Callable[[nn.Module], Result], slow_links: bool = False
) -> Result | None:
    """Load this process's stage of a model and run it; on the first node, call `main` with the model.

    Call it in every process of `torchrun` or `bigmodel launch`, as many as the plan has stages. Process 0 has the
    first stage: `main` gets a model whose `generate` and calls run all stages, with the bits of one process. The other
    processes follow until `main` returns.

    If a process ends, calls of the model raise ServeError, and so does this function in the processes that are left:
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
        ServeError: a process of another stage is gone.
    """
    stages = plan.stages
    if len(stages) > 1 and "WORLD_SIZE" not in os.environ:
        raise LaunchError(
            f"the plan has {len(stages)} stages: start as many processes with torchrun or bigmodel launch"
        )
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count != len(stages):
        raise LaunchError(f"the plan has {len(stages)} stages, and {count} processes were started: start one for each")
    stage = stages[rank]
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    model = from_pretrained(checkpoint, device_map=stage.plan, layers=(stage.start, stage.stop))

    def peer(other: int) -> Peer | None:
        if not 0 <= other < count:
            return None
        link = next((LinkSpeed(each.rate, each.latency) for each in plan.crossings[rank : rank + 1]), None)
        return Peer(other, stages[other].node, link if slow_links else None)

    ends = None if count == 1 else peer({0: count - 1, count - 1: 0}.get(rank, -1))
    running = RunningStage(model, stage.start, stage.stop, peer(rank - 1), peer(rank + 1), ends)
    if rank:
        with torch.inference_mode():
            running.follow()
        return None
    result = main(model)
    running.stop_others()
    return result
