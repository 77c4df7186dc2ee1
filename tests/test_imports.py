"""What is imported when: PyTorch takes seconds, and transformers, torchao and Dynamo take seconds more.

One interpreter answers all questions, as each takes seconds to import PyTorch: it goes on from little to much, and
writes after every step what it has imported by then.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .shared import Once

PROGRAM = """
import json
import sys

HEAVY = ("torch", "torch._dynamo", "transformers", "torchao")

def done(step, **found):
    print(json.dumps([step, {"imported": [name for name in HEAVY if name in sys.modules], **found}]), flush=True)

import bigmodel
done("package", names=sorted(dir(bigmodel)))

assert bigmodel.plan.plan and bigmodel.profile.profile_model and bigmodel.server
done("rooms")

import torch
from torch import nn
from bigmodel.devices import virtual

def sequence():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def run(model):
    with torch.no_grad():
        model(torch.ones(1, 8))
    model(torch.ones(1, 8)).sum().backward()

run(bigmodel.dispatch_model(sequence(), {"": "cpu"}))
virtual.enable(count=1)
dispatched = bigmodel.dispatch_model(sequence(), {"": "cpu"}, main_device="virtual:0")
run(dispatched)
done("dispatch")
virtual.disable()

assert bigmodel.profile.profile_model(sequence(), sample_inputs=(torch.zeros(1, 8),)).phases
assert bigmodel.plan.plan(sequence(), max_memory={"cpu": "1MB"}).parts
done("plan")

virtual.enable(count=1)
with torch.no_grad():
    torch.compile(dispatched, backend="eager")(torch.ones(1, 8))
from torch._dynamo import trace_rules
from bigmodel.dispatch.attach.attached_forward import AttachedForward
done("compile", untraced=bool(trace_rules.check(AttachedForward.__call__)))

import bigmodel.train
strategies = ("bigmodel.train.strategies.sharded", "bigmodel.train.strategies.deepspeed", "deepspeed")
done("train", strategies=[name for name in sys.modules if name.startswith(strategies)])

from bigmodel.cli.log_filters import filter_library_logs
filter_library_logs()
sys.stderr.write("only torchao writes after this\\n")
if sys.argv[1:]:
    import torchao
    done("torchao")
"""


@pytest.fixture(scope="module")
def written(once: Once) -> list[str]:
    """What the interpreter, which has taken every step, wrote on its output and as errors."""

    def run(_: Path) -> list[str]:
        torchao = ["torchao"] if importlib.util.find_spec("torchao") else []
        done = subprocess.run([sys.executable, "-c", PROGRAM, *torchao], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [done.stdout, done.stderr]

    found: list[str] = once("imports", run)
    return found


@pytest.fixture(scope="module")
def after(written: list[str]) -> dict[str, dict[str, Any]]:
    """What was found after each step."""
    return dict(map(json.loads, written[0].splitlines()))


@pytest.mark.slow
def test_importing_the_package_imports_no_torch_and_names_are_listed_before_their_first_use(
    after: dict[str, dict[str, Any]],
) -> None:
    import bigmodel

    assert after["package"]["imported"] == []
    assert set(after["package"]["names"]) >= {*bigmodel.__all__}


@pytest.mark.slow
def test_rooms_are_attributes(after: dict[str, dict[str, Any]]) -> None:
    assert "transformers" not in after["rooms"]["imported"]


@pytest.mark.slow
def test_a_plain_module_is_dispatched_and_runs_without_heavy_imports(after: dict[str, dict[str, Any]]) -> None:
    assert after["dispatch"]["imported"] == ["torch"]


@pytest.mark.slow
def test_planning_a_plain_module_imports_no_transformers(after: dict[str, dict[str, Any]]) -> None:
    assert "transformers" not in after["plan"]["imported"]


@pytest.mark.slow
def test_a_compiler_that_is_imported_after_dispatching_leaves_the_attachments_untraced(
    after: dict[str, dict[str, Any]],
) -> None:
    assert "torch._dynamo" in after["compile"]["imported"]
    assert after["compile"]["untraced"]


@pytest.mark.slow
def test_a_process_that_trains_imports_no_transformers(after: dict[str, dict[str, Any]]) -> None:
    assert "transformers" not in after["train"]["imported"]


@pytest.mark.slow
def test_strategies_are_imported_when_they_are_chosen(after: dict[str, dict[str, Any]]) -> None:
    assert after["train"]["strategies"] == []


@pytest.mark.slow
def test_importing_torchao_logs_nothing(written: list[str], after: dict[str, dict[str, Any]]) -> None:
    if "torchao" not in after:
        pytest.skip("torchao is not installed")
    assert written[1].endswith("only torchao writes after this\n"), written[1]
