"""Dispatching a plain module imports neither transformers nor Dynamo: each takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "transformers", "torchao")

PROGRAM = """
import sys
import torch
from bigmodel import dispatch_model
from bigmodel.devices import virtual

virtual.enable(count=1)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
dispatch_model(model, {device_map!r}, main_device={main!r})
with torch.no_grad():
    model(torch.ones(1, 3))
model(torch.ones(1, 3)).sum().backward()
print(*(name for name in {heavy!r} if name in sys.modules))
"""


@pytest.mark.parametrize(("device_map", "main"), [({"": "cpu"}, None), ({"": "cpu"}, "virtual:0")])
def test_a_plain_module_is_dispatched_and_runs_without_heavy_imports(
    device_map: dict[str, str], main: str | None
) -> None:
    program = PROGRAM.format(device_map=device_map, main=main, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
