"""What does a plan over several hosts predict for a model of 671 billion parameters in fp8?

On paper: four hosts with two accelerators of 80 GB and 500 GB of RAM each, at nominal speeds, linked at 100 Gbit/s. The
checkpoint consists of headers without data, as in `plan_large`. Nothing is measured but the time to plan.
"""

from __future__ import annotations

import argparse
import time

from bigmodel.plan import Nodes, NodesPlan, parse_nodes, plan_nodes
from bigmodel.plan.nodes.planner import OBJECTIVES

from .harness import Column, Report, Table
from .harness.report import Cell
from .plan_large import make

ARCHITECTURE = "671B mixture, fp8"
CONTEXT, NEW_TOKENS = 4096, 512

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it plans from headers and runs nothing"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark: none."""


def four_hosts(accelerator: str = "80GB", ram: str = "500GB") -> Nodes:
    """Return the hosts on paper."""
    budgets = {"0": accelerator, "1": accelerator, "cpu": ram}
    nodes = [{"name": name, "max_memory": budgets, "machine": "nominal"} for name in ("a", "b", "c", "d")]
    return parse_nodes({"nodes": nodes, "link": {"rate": "12.5GB", "latency": 2e-5}})


def run(options: argparse.Namespace) -> Report:
    """Plan for the least step and for the fastest slowest stage."""
    folder = make(ARCHITECTURE, options.workdir, options.quick)
    nodes = four_hosts("2MB", "50MB") if options.quick else four_hosts()
    context, new_tokens = (64, 16) if options.quick else (CONTEXT, NEW_TOKENS)
    rows: list[list[Cell]] = []
    for objective in OBJECTIVES:
        began = time.perf_counter()
        made = plan_nodes(folder, nodes, 1, context, new_tokens=new_tokens, objective=objective)
        rows.append([objective, *_figures(made), time.perf_counter() - began])
    columns = [
        Column("cut for"),
        Column("layers of each host"),
        Column("weights", "bytes"),
        Column("streamed", "bytes"),
    ]
    columns += [Column("predicted step", "seconds"), Column("slowest stage", "seconds"), Column("prompt", "seconds")]
    columns += [Column("time to plan", "seconds")]
    return Report(
        "plan_nodes",
        options.device,
        settings={"context": context, "new tokens": new_tokens},
        tables=[Table("Four hosts of two accelerators, by nominal speeds", columns, rows)],
        notes=["Speeds are nominal, not measured: the figures are those of the simulator."],
    )


def _figures(made: NodesPlan) -> list[Cell]:
    layers = ", ".join(str(stage.stop - stage.start) for stage in made.stages)
    weights = sum(part.bytes for stage in made.stages for part in stage.plan.parts)
    streamed = sum(part.bytes for stage in made.stages for part in stage.plan.streamed)
    return [layers, weights, streamed, made.step, made.slowest, made.prefill]
