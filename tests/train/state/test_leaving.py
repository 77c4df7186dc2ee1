"""A process ends with its own exit code, whatever gloo's threads are doing at that moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# In each child, a thread of gloo waits for the interpreter's lock, which it needs to let go of tensors, when the
# program's last line is done: the interpreter is not given up to it before. Something still refers to the group.
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from bigmodel.train import Accelerator, PartialState

def child(end):
    global kept
    state = PartialState(cpu=True)
    state.need_process_group()
    kept = dist.group.WORLD
    accelerator = Accelerator(cpu=True)
    sys.setswitchinterval(1000)
    dist.all_reduce_coalesced([torch.ones(1 << 22), *torch.ones(200, 1)], async_op=True)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    if end == "end_training":
        accelerator.end_training()
    elif end == "error":
        raise ValueError("meant")
    elif end == "exit 3":
        sys.exit(3)

def codes(ends):
    running = {}
    for end in ends:
        pid = os.fork()
        if pid == 0:
            return end
        running[end] = pid
    codes = {end: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for end, pid in running.items()}
    print(json.dumps(codes))

end = codes(["nothing", "end_training", "error", "exit 3"])
if end is not None:
    child(end)
"""


def test_a_thread_that_is_not_done_does_not_abort_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    assert json.loads(done.stdout) == {"nothing": 0, "end_training": 0, "error": 1, "exit 3": 3}, done.stderr
    assert "terminate called" not in done.stderr
