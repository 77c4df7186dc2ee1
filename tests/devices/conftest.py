"""One interpreter of its own for all tests that look at what happens in one: each takes seconds to import PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.shared import Once

# When its last line is done, the autograd thread of the device waits for the interpreter's lock, which it needs to
# begin and to let go of gradients: the interpreter is not given up to it before.
SCRIPT = """
import atexit, json, os, sys
import torch

TASKS = "/proc/self/task"

def threads():
    return {each: open(f"{TASKS}/{each}/comm").read() for each in os.listdir(TASKS)} if os.path.isdir(TASKS) else {}

@atexit.register  # called after what the library registers
def show():
    found["not begun"] = [name for each, name in threads().items() if each not in known and name in known.values()]
    print(json.dumps(found))

from bigmodel.devices import accelerators, free_memory_bytes, max_memory_allocated, memory_allocated, reset_peak_memory

found = {"accelerators": accelerators(), "free": free_memory_bytes(0)}
reset_peak_memory("cpu")
before = memory_allocated("cpu")
block = torch.ones(2**26, dtype=torch.uint8)
found["grown"] = memory_allocated("cpu") - before
del block
found["peak"] = max_memory_allocated("cpu") - before
reset_peak_memory("cpu")
found["peak after reset"] = max_memory_allocated("cpu") - before

known = threads()
sys.setswitchinterval(1000)
weight = torch.ones(3, device="virtual:0", requires_grad=True)
(weight * 2).sum().backward()
found["gradient"] = weight.grad.sum().item()
"""


@dataclass(frozen=True)
class Ended:
    """What the script found, and how its process ended."""

    found: dict[str, Any]
    code: int
    errors: str


@pytest.fixture(scope="session")
def own_process(once: Once) -> Ended:
    """Run the script in an interpreter that is started with two virtual accelerators of 1 MiB."""
    return Ended(*once("own-process", ended))


def ended(_: Path) -> tuple[dict[str, Any], int, str]:
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "BIGMODEL_VIRTUAL": "2x1MiB"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=90)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, done.stderr
