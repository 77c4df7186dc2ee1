from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel import from_pretrained
from bigmodel.errors import LaunchError
from bigmodel.nodes import run_over_nodes
from bigmodel.plan import Node, Nodes, NodesPlan, plan_nodes
from bigmodel.profile.machine.machine import LinkSpeed, nominal_machine
from tests.preloaded import ROOT, python_executable, run

from .deployment import generated

MODULES = ("bigmodel.nodes", "transformers.models.llama.modeling_llama")
"""What the processes import, beside what every preloaded program has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "model"
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128)).save_pretrained(path, max_shard_size="200KB")
    return path


def three_nodes(folder: Path, rate: float = 1e9) -> NodesPlan:
    """Return a plan for three nodes, the second of which has too little RAM for its layers."""
    budgets = ("10MB", "400KB", "10MB")
    nodes = tuple(Node(f"n{at}", {"cpu": budget}, nominal_machine()) for at, budget in enumerate(budgets))
    return plan_nodes(folder, Nodes(nodes, LinkSpeed(rate)), 2, context_length=32)


def launched(
    folder: Path, plan: NodesPlan, output: Path, *options: str, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the deployment in three processes to its end: they are forked with all that they import."""
    (output / "plan.json").write_text(plan.to_json())
    command = ["-m", "bigmodel.cli.main", "launch", "--cpu", "--num_processes", "3"]
    command += ["--max_restarts", str(restarts), "--monitor_interval", "0.2", "-m", "tests.nodes.deployment"]
    command += [str(folder), str(output / "plan.json"), str(output), *options]
    python = str(python_executable(*MODULES))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python}
    return run(command, environment, timeout=240)


@pytest.mark.slow
def test_a_killed_process_ends_requests_clearly_and_the_deployment_comes_back_with_the_bits_of_one_process(
    folder: Path, tmp_path: Path
) -> None:
    done = launched(folder, three_nodes(folder), tmp_path, "--kill", "1", restarts=1)
    assert done.returncode == 0, done.stderr
    assert "no longer answers" in (tmp_path / "0.error").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    torch.set_num_threads(1)
    expected = generated(from_pretrained(folder, device_map={"": "cpu"}))
    assert found["tokens"] == expected["tokens"]
    assert found["logits"] == expected["logits"]
    assert found["cpu"] < expected["cpu"] / 2
    assert not any(psutil.pid_exists(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(3))


@pytest.mark.long
@pytest.mark.slow
def test_without_restarts_a_killed_process_ends_all(folder: Path, tmp_path: Path) -> None:
    done = launched(folder, three_nodes(folder), tmp_path, "--kill", "2")
    assert done.returncode != 0
    assert not (tmp_path / "found.json").exists()
    assert not any(psutil.pid_exists(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(3))


def test_as_many_processes_as_stages_are_needed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    stages = NodesPlan("Llama", (None, None))  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="has 2 stages: start as many processes"):
        run_over_nodes(folder, stages, print)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LaunchError, match="has 2 stages, and 3 processes were started"):
        run_over_nodes(folder, stages, print)
