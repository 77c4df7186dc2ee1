"""Processes that save their state over and over, until one of them is killed."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

from bigmodel.train import Accelerator, ProjectConfiguration
from tests.preloaded import Program
from tests.train.multiprocess import fresh_states, start_ranks


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


def save_forever(folder: Path, automatic: bool) -> None:
    """Be one process of a run that saves, and write a line before and after each save."""
    run = Stamped(folder, automatic)
    for number in range(1, 10_000):
        run.stamp(number)
        os.write(1, b"begun\n")
        run.accelerator.save_state(None if automatic else folder / "state")
        os.write(1, b"done\n")


def kill_during_save(folder: Path, automatic: bool, seed: int) -> tuple[int, set[float]]:
    """Kill a process at a random moment of a save; return the last save that was done, and the numbers then loaded."""
    chance = random.Random(seed)
    ranks = start_ranks(["-m", "tests.train.killed", folder, "automatic" if automatic else ""])
    try:
        done = _kill_one(ranks[chance.randrange(2)], chance)
    finally:
        for rank in ranks:
            rank.kill()
    fresh_states()
    run = Stamped(folder, automatic)
    run.stamp(-1)
    run.accelerator.load_state(None if automatic else folder / "state")
    return done, run.numbers()


def _kill_one(victim: Program, chance: random.Random) -> int:
    """Kill a process that saves, after two or three saves; return how many it has done."""
    durations = []
    for _ in range(2 + chance.randrange(2)):
        assert victim.stdout.readline() == "begun\n", victim.stderr.read()[-3000:]
        begun = time.perf_counter()
        assert victim.stdout.readline() == "done\n", victim.stderr.read()[-3000:]
        durations.append(time.perf_counter() - begun)
    victim.stdout.readline()
    time.sleep(chance.uniform(0, 1.1 * min(durations)))
    victim.kill()
    return len(durations) + victim.stdout.read().count("done\n")


if __name__ == "__main__":
    save_forever(Path(sys.argv[1]), bool(sys.argv[2]))
