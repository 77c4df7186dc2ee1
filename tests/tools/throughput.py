"""Compares how fast virtual accelerators compute with how fast they did at another commit.

    git worktree add ../before COMMIT
    python -m tests.tools.throughput ../before [--rounds N] [--seconds S] [--only WORKLOAD ...] [--cpu]

Each round measures both trees in processes of their own, in random order, on accelerators that compute when they are
asked and whose links take no time. Printed are the medians over all rounds, in milliseconds, and their ratio: below 1,
this tree is faster. With --cpu these are milliseconds of the processor, of all threads of the process together, which
say more than the clock's on a machine that does other work meanwhile. This file runs in the other tree as it is: it
uses nothing that a commit may lack.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Times = dict[str, list[float]]
"""Milliseconds of each repetition of each workload, by its name."""


def measured(seconds: float, only: Sequence[str] = (), clock: Callable[[], float] = time.perf_counter) -> Times:
    """Return the milliseconds of each repetition of each workload, which gets so many seconds.

    Args:
        seconds: Seconds by the wall clock for each workload.
        only: Texts of which one is in the name of each workload to be measured; none: all of them are.
        clock: Returns the seconds by which repetitions are timed.
    """
    import torch
    from torch import Tensor, nn

    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model

    torch.set_num_threads(1)
    virtual.enable(count=1)
    device = torch.device("virtual", 0)
    inputs = torch.randn(4, 64, 256)

    def model() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    resident = model().eval().to(device)
    streamed = dispatch_model(model().eval(), {"": "cpu"}, main_device=0)
    trained = model().train().to(device)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    on_device = inputs.to(device)
    small, copied = torch.ones(64, device=device), torch.ones(2**20)

    def forward(module: nn.Module, given: Tensor) -> None:
        with torch.no_grad():
            module(given).cpu()

    def operations() -> None:
        value = small
        for _ in range(200):
            value = value * 0.5 + 1
        value.cpu()

    def step() -> None:
        trained(on_device).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    workloads: dict[str, Callable[[], object]] = {
        "resident forward": lambda: forward(resident, on_device),
        "streamed forward": lambda: forward(streamed, inputs),
        "400 operations": operations,
        "training step": step,
        "4 MiB there and back": lambda: copied.to(device).cpu(),
    }
    chosen = [name for name in workloads if not only or any(text in name for text in only)]
    return {name: _repeated(workloads[name], seconds, clock) for name in chosen}


def _repeated(work: Callable[[], object], seconds: float, clock: Callable[[], float]) -> list[float]:
    for _ in range(3):
        work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = clock()
        work()
        times.append((clock() - begun) * 1000)
    return times


def _measured_in(tree: Path, arguments: argparse.Namespace) -> Times:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIGMODEL_")}
    command = [sys.executable, __file__, "--here", "--seconds", str(arguments.seconds), "--only", *arguments.only]
    if arguments.cpu:
        command.append("--cpu")
    ran = subprocess.run(
        command, cwd=tree, env={**environment, "PYTHONPATH": str(tree)}, check=True, stdout=subprocess.PIPE
    )
    found: Times = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the root of the other tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each workload in each round")
    parser.add_argument("--only", nargs="*", default=[], help="only workloads whose name has one of these")
    parser.add_argument("--cpu", action="store_true", help="measure the processor's time instead of the clock's")
    parser.add_argument("--here", action="store_true", help="measure one tree, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        clock = time.process_time if arguments.cpu else time.perf_counter
        print(json.dumps(measured(arguments.seconds, arguments.only, clock)))
        return
    if arguments.before is None:
        parser.error("name the root of the other tree")
    trees = {"before": arguments.before.resolve(), "now": ROOT}
    times: dict[str, Times] = {}
    for _ in range(arguments.rounds):
        for name in random.sample(list(trees), len(trees)):
            for workload, found in _measured_in(trees[name], arguments).items():
                times.setdefault(workload, {each: [] for each in trees})[name] += found
    for workload, by_tree in times.items():
        before, now = (statistics.median(by_tree[name]) for name in trees)
        print(f"{workload:24} before {before:9.3f} ms   now {now:9.3f} ms   ratio {now / before:.3f}")


if __name__ == "__main__":
    main()
