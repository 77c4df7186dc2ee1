from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigmodel.verify.verify import Finding

from ..dispatch.mixtures import mixtral

SCRIPT = """
import sys, dataclasses
from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine import probe
from bigmodel.profile.machine.timing import Effort
from bigmodel.profile.machine.machine import nominal_machine
folder = probe.cache_folder(); folder.mkdir(parents=True); key = probe.machine_key(Effort())
(folder / f"{key}.json").write_text(machine_json.dump(dataclasses.replace(nominal_machine(), key=key)))
from bigmodel.cli.main import run
sys.exit(run(sys.argv[1:]))
"""

PER_PASS = (
    SCRIPT.replace("import sys, dataclasses", "import sys, dataclasses\nfrom tests.plan.machines import machine")
    .replace("nominal_machine()", "machine(link=1e8, host=4e-9)")
    .partition("from bigmodel.cli")[0]
    + """
import json
from bigmodel.verify.verify import verify
shapes = {"context_length": 256, "new_tokens": 2, "objective": "throughput"}
plan, findings = verify(sys.argv[2], {0: "5300KB", "cpu": "1GB"}, offload="auto", **shapes)
peak = next(one for one in findings if one.device == "virtual:0")
print(json.dumps([len(plan.computed_below), peak.predicted, peak.measured]))
"""
)


def verified(folder: Path, *options: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run `bigmodel verify` in a process of its own, on a virtual accelerator, the machine being known already."""
    return subprocess.run(
        [sys.executable, "-c", script, "verify", str(folder / "model"), "--json", *options],
        env={**os.environ, "XDG_CACHE_HOME": str(folder), "BIGMODEL_VIRTUAL": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        vocab_size=160,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_accelerators_peak_is_what_the_plan_says_and_the_exit_code_says_whether_all_is(folder: Path) -> None:
    done = verified(folder, "--max-memory", "0=900KB,cpu=1GB", "--tolerance", "1e9")  # with as many tokens as it allows
    findings = json.loads(done.stdout)
    peak = next(one for one in findings if one["device"] == "virtual:0")
    assert peak["predicted"] == peak["measured"]
    assert {one["what"] for one in findings if one["unit"] == "seconds"} == {"prompt", "step"}
    assert done.returncode == (1 if any(abs(one["error"]) > 0.2 for one in findings if one["unit"] == "seconds") else 0)


@pytest.mark.parametrize("budget", ["720KB", "1100KB"])
def test_a_streamed_mixtures_peak_is_what_the_plan_says(budget: str, tmp_path: Path) -> None:
    """Its first weights lie on the host, so that `transformers` decodes by another function than beside a device."""
    mixtral(num_hidden_layers=8).save_pretrained(tmp_path / "model")
    options = ["--max-memory", f"0={budget},cpu=1GB", "--context", "32", "--batch-size", "2"]
    findings = json.loads(verified(tmp_path, *options).stdout)
    peak = next(one for one in findings if one["device"] == "virtual:0")
    assert peak["predicted"] == peak["measured"]


def test_a_plan_that_streams_prompts_and_computes_steps_is_held_to_its_peak(tmp_path: Path) -> None:
    """On a machine whose link is worth its way for a prompt, and not for a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, vocab_size=160,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    done = verified(tmp_path, script=PER_PASS)
    parts, predicted, measured = json.loads(done.stdout)
    assert parts > 0
    assert predicted == measured


def test_an_error_is_a_share_of_what_was_measured() -> None:
    assert Finding("cpu", "peak memory", "bytes", 90, 100).error == pytest.approx(-0.1)
    assert Finding("cpu", "peak memory", "bytes", 0, 0).error == 0
