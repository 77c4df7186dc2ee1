"""Dispatching a plain module imports neither transformers nor Dynamo: each takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from bigmodel import dispatch_model
from bigmodel.devices import virtual

def heavy():
    return [name for name in ("torch._dynamo", "transformers", "torchao") if name in sys.modules]

def sequence():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

def run(model):
    with torch.no_grad():
        model(torch.ones(1, 3))
    model(torch.ones(1, 3)).sum().backward()

run(dispatch_model(sequence(), {"": "cpu"}))
assert not heavy(), heavy()
virtual.enable(count=1)
run(dispatch_model(sequence(), {"": "cpu"}, main_device="virtual:0"))
assert not heavy(), heavy()
"""


@pytest.mark.slow
def test_a_plain_module_is_dispatched_and_runs_without_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
