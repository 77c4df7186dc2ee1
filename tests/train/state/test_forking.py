"""Workers of data loaders beside a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A group that nobody can reach any more is garbage that only the collector finds, here in the worker.
SCRIPT = """
import gc
import torch.distributed as dist
from torch.utils.data import DataLoader
from bigmodel.train import Accelerator, PartialState

class Collecting:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index

gc.disable()
PartialState(cpu=True).need_process_group()
garbage = [dist.group.WORLD]
garbage.append(garbage)
del garbage
PartialState().destroy_process_group()
loader = DataLoader(Collecting(), batch_size=2, num_workers=1, timeout=20)
print([batch.tolist() for batch in PREPARED])
print(gc.get_freeze_count())
"""


@pytest.mark.parametrize("prepared", ["loader", "Accelerator(cpu=True).prepare(loader)"], ids=["bare", "prepared"])
def test_a_worker_does_not_wait_for_threads_that_it_does_not_have(prepared: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("PREPARED", prepared)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["[[0, 1], [2, 3]]", "0"], done.stderr
