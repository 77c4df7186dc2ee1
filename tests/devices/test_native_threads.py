"""A process ends with its own exit code, whatever PyTorch's threads are doing at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigmodel.devices.native_threads import let_threads_finish

# The autograd thread of the device waits for the interpreter's lock, which it needs to let go of gradients, when the
# program's last line is done: the interpreter is not given up to it before.
SCRIPT = """
import sys
import torch
from bigmodel.devices import virtual

virtual.enable(1)
sys.setswitchinterval(1000)
weight = torch.ones(3, device="virtual:0", requires_grad=True)
(weight * 2).sum().backward()
print(weight.grad.sum().item())
"""


@pytest.mark.slow
def test_a_thread_that_is_not_done_does_not_abort_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "6.0\n"), done.stderr


def test_waiting_ends_at_once_without_such_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    let_threads_finish("no such thread")
    assert not pauses or sys.platform != "linux"
