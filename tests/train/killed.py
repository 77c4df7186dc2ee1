"""Processes that save their state over and over, until one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigmodel.train import Accelerator, ProjectConfiguration
from tests.train.multiprocess import free_port, fresh_states


class Stamped:
    """A model, its optimizer's state and an object, all of which hold the number of the save they belong to."""

    def __init__(self, folder: Path, automatic: bool) -> None:
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=automatic, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        model = nn.Linear(400, 400)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        self.accelerator.register_for_checkpointing(self)
        self.model(torch.zeros(1, 400)).sum().backward()
        self.optimizer.step()
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]

    @torch.no_grad()
    def stamp(self, number: int) -> None:
        """Write the number everywhere."""
        self.number = number
        for tensor in self._tensors():
            tensor.fill_(number)

    def numbers(self) -> set[float]:
        """Return all the numbers found."""
        return {float(self.number)} | {float(value) for tensor in self._tensors() for value in tensor.aminmax()}

    def _tensors(self) -> list[torch.Tensor]:
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]


def save_forever(rank: int, port: int, folder: Path, automatic: bool, started: Connection) -> None:
    """Be one process of a run that saves, telling the number of each save when it begins and when it is done."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the end of the other process is reported there
    torch.set_num_threads(1)
    run = Stamped(folder, automatic)
    for number in range(1, 10_000):
        run.stamp(number)
        started.send(("begun", number))
        run.accelerator.save_state(None if automatic else folder / "state")
        started.send(("done", number))


def kill_during_save(folder: Path, automatic: bool, seed: int) -> tuple[int, set[float]]:
    """Kill a process at a random moment of a save; return the last save that was done, and the numbers then loaded."""
    chance = random.Random(seed)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.killed"])
    port, pipes, ranks = free_port(), [], []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        ranks.append(context.Process(target=save_forever, args=(rank, port, folder, automatic, there), daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    victim = chance.randrange(2)
    try:
        done = _last_done(ranks[victim], pipes[victim], chance)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    fresh_states()
    run = Stamped(folder, automatic)
    run.stamp(-1)
    run.accelerator.load_state(None if automatic else folder / "state")
    return done, run.numbers()


def _last_done(victim: Any, reports: Connection, chance: random.Random) -> int:
    durations = []
    for _ in range(2 + chance.randrange(2)):
        assert reports.recv()[0] == "begun"
        begun = time.perf_counter()
        what, done = reports.recv()
        assert what == "done"
        durations.append(time.perf_counter() - begun)
    reports.recv()
    time.sleep(chance.uniform(0, 1.1 * min(durations)))
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    try:
        while reports.poll():
            what, number = reports.recv()
            done = number if what == "done" else done
    except EOFError:
        pass
    return int(done)
