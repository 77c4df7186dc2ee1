"""Does a step over several nodes take what its plan predicts, and does it have the bits of one process?

Three processes on one host compute a Llama's stages, each on a virtual accelerator that holds its layers, and hand
hidden states on over a network of a set speed. The accelerators have one, too, below that of the cores: nodes on one
host share its caches and its memory, which nodes of their own do not. The plan is made with this speed and with what
else the machine's own probe measures, in a process that has as many threads. All deployments run throughout and wait
for their turn. Two of them are single processes and have no limit: one with such an accelerator that holds all layers,
and one that streams most of them over a link of a set speed, and computes as fast as the host does.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, Variant, measure, run_isolated
from .harness.isolate import environment_of_children
from .harness.report import Cell

if TYPE_CHECKING:
    from bigmodel.plan import NodesPlan
    from bigmodel.profile.machine.machine import MachineProfile

LINKS: Mapping[str, tuple[float, float]] = {
    "three nodes, 10 GB/s, 20 us": (10e9, 2e-5),
    "three nodes, 100 MB/s, 1 ms": (1e8, 1e-3),
    "three nodes, 5 MB/s, 5 ms": (5e6, 5e-3),
}
"""Bytes per second and seconds of latency between any two nodes."""
ALONE, ROOMY = "one node", "one node that holds all"
ROOM = 4_000_000_000
"""Bytes of an accelerator that holds all layers."""
NAMES = ("a", "b", "c")
FLOPS = 8e8
"""Multiplications and additions per second of each accelerator: a step of the model takes a quarter of a second."""
CONTEXT = 64
WITHIN = 1.1

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "links of a set speed are a virtual accelerator's"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 8x1024, 4x512 (--quick)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps behind each value")
    parser.add_argument("--link", type=float, default=1.0, help="GB/s of each accelerator's link")
    parser.set_defaults(device="virtual", rounds=7)


def run(options: argparse.Namespace) -> Report:
    """Plan and start all deployments, check their bits, and measure their steps in the same rounds."""
    size = options.size or ("4x512" if options.quick else "8x1024")
    capacity = 60_000_000 if size == "4x512" else 170_000_000
    options.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.workdir) as work, ExitStack() as stack:
        folder = str(Path(work, "model"))
        made = run_isolated(
            planned,
            folder=folder,
            size=size,
            seed=options.seed,
            capacity=capacity,
            rate=options.link * 1e9,
            links=list(LINKS)[-1:] if options.quick else list(LINKS),
        )
        found = {
            name: stack.enter_context(deployed(folder, plan["plan"], Path(work), plan["accelerator"]))
            for name, plan in made.items()
        }
        bits = {name: each.ask("logits") for name, each in found.items()}
        variants = [Variant(name, partial(each.ask, str(options.steps))) for name, each in found.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    columns = [Column("deployment"), Column("layers"), Column("streamed per step", "bytes")]
    columns += [Column("on links", "seconds"), Column("predicted step", "seconds"), Column("measured", "seconds")]
    columns += [Column("measured over predicted", "ratio"), Column("logits as one node's")]
    rows: list[list[Cell]] = []
    ratios: dict[str, float] = {}
    for name, plan in made.items():
        ratios[name] = samples.median(name) / plan["step"]
        equal = "yes" if bits[name] == bits[ALONE] else "no"
        figures = [plan["layers"], plan["streamed"], plan["links"], plan["step"], samples.median(name)]
        rows.append([name, *figures, ratios[name], equal])
    differ = sum(each != bits[ALONE] for each in bits.values())
    limits = [Limit("deployments whose logits differ from those of one node", differ, "==", 0, "count")]
    if not options.quick:
        worst = max(max(ratio, 1 / ratio) for name, ratio in ratios.items() if name in LINKS)
        limits.append(Limit("measured over predicted step of several nodes, or its inverse", worst, "<=", WITHIN))
    return Report(
        "nodes",
        options.device,
        settings={
            "size": size,
            "accelerator": capacity,
            "link": options.link * 1e9,
            "flops": FLOPS,
            "steps": options.steps,
        },
        tables=[Table(f"A decode step of a Llama of {size}, one thread each", columns, rows)],
        limits=limits,
        samples={"step": samples},
    )


def planned(
    folder: str, size: str, seed: int, capacity: int, rate: float, links: list[str]
) -> dict[str, dict[str, Any]]:
    """Save a Llama, and return the plan of each deployment with its figures; called in a process of its own."""
    import torch

    from bigmodel.devices import virtual
    from bigmodel.plan import Node, Nodes, plan_nodes
    from bigmodel.profile.machine.machine import LinkSpeed
    from bigmodel.profile.machine.probe import machine

    from .serve_model import random_llama

    torch.set_num_threads(1)
    virtual.enable(count=1, capacity=ROOM, bandwidth=rate)
    random_llama(size, seed).save_pretrained(folder)
    measured = machine(refresh=True)  # at the speed that this machine has today
    found: dict[str, dict[str, Any]] = {}
    for name in (ROOMY, ALONE, *links):
        budget = ROOM if name == ROOMY else capacity
        names = NAMES if name in LINKS else NAMES[:1]
        speeds = {"bandwidth": rate} if name == ALONE else {"flops": FLOPS}
        known = measured if name == ALONE else with_set_speed(measured)
        nodes = tuple(Node(each, {0: budget, "cpu": "4GB"}, known) for each in names)
        link = LinkSpeed(*LINKS.get(name, (1e9, 0.0)))
        made = plan_nodes(folder, Nodes(nodes, link), 1, CONTEXT, new_tokens=CONTEXT // 2)
        found[name] = _figures(made, budget, speeds)
    return found


def with_set_speed(machine: MachineProfile) -> MachineProfile:
    """Return the machine with an accelerator that computes `FLOPS`, beside the program that launches its operations."""
    from .stages import curves_of

    accelerator = replace(machine.device("virtual:0"), curves=curves_of(FLOPS), asynchronous=True)
    return replace(machine, devices={**machine.devices, "virtual:0": accelerator})


def _figures(made: NodesPlan, budget: int, speeds: Mapping[str, float]) -> dict[str, Any]:
    """Return a plan with its figures, and the accelerator that each of its nodes has."""
    return {
        "plan": made.to_json(),
        "accelerator": {"capacity": budget, **speeds},
        "layers": ", ".join(str(stage.stop - stage.start) for stage in made.stages),
        "streamed": sum(part.bytes for stage in made.stages for part in stage.plan.streamed),
        "links": sum(crossing.step for crossing in made.crossings),
        "step": made.step,
    }


@dataclass
class Deployment:
    """The first process of a deployment, which answers."""

    first: subprocess.Popen[str]

    def ask(self, line: str) -> Any:
        """Return the answer to a line of `nodes_stage`."""
        assert self.first.stdin is not None
        assert self.first.stdout is not None
        print(line, file=self.first.stdin, flush=True)
        return json.loads(self.first.stdout.readline())


@contextmanager
def deployed(folder: str, plan: str, work: Path, accelerator: Mapping[str, float]) -> Iterator[Deployment]:
    """Start the processes of a plan, each with an accelerator of this capacity and speed; they end with the context."""
    with tempfile.NamedTemporaryFile("w", dir=work, suffix=".json", delete=False) as file:
        file.write(plan)
    count = len(json.loads(plan)["stages"])
    shared = {**environment_of_children(), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", f"{__package__}.nodes_stage", folder, file.name, json.dumps(accelerator)]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            env = {**shared, "RANK": str(rank), "WORLD_SIZE": str(count)}
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True))
        yield Deployment(processes[0])
    finally:
        if processes and processes[0].stdin is not None:
            processes[0].stdin.close()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port of this host on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
