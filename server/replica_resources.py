"""How much of a cluster one replica takes, so that all of them find a place."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Processors and GPUs of one machine of the cluster."""

    cpus: int
    gpus: int = 0


def resources(machines: Seq[Machine], replicas: int) -> dict[str, float]:
    """What each of ``replicas`` takes: as many GPUs, then processors, as all of them can have alike.

    Where there are fewer GPUs than replicas, several share one. Ray gives a replica as many threads as processors.
    """
    gpus = sum(machine.gpus for machine in machines)
    if not gpus:
        return {"num_cpus": _cpus(machines, 0, replicas)}
    share = max((n for n in range(1, gpus + 1) if _places(machines, 1, n) >= replicas), default=0)
    if share:
        return {"num_cpus": _cpus(machines, share, replicas), "num_gpus": share}
    # So many on each GPU that all find a place; a GPU of one machine cannot be made up for by another's.
    return {"num_cpus": 1, "num_gpus": 1 / -(-replicas // gpus)}


def _cpus(machines: Seq[Machine], gpus: int, replicas: int) -> int:
    most = max((machine.cpus for machine in machines), default=1)
    return max((n for n in range(1, most + 1) if _places(machines, n, gpus) >= replicas), default=1)


def _places(machines: Seq[Machine], cpus: int, gpus: int) -> int:
    """How many replicas of this size there is room for."""
    return sum(
        min(machine.cpus // cpus, machine.gpus // gpus if gpus else machine.cpus // cpus) for machine in machines
    )
