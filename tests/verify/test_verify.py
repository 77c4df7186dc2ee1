"""Plans are verified on a virtual accelerator, in one process of their own: memory is counted from a known state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.caching import MemoryPeaks
from bigmodel.plan import Plan
from bigmodel.plan.result.plan import DevicePlan
from bigmodel.verify.verify import Finding, peaks_of_accelerator
from tests.examples import some
from tests.preloaded import run
from tests.shared import Once

from ..dispatch.mixtures import mixtral
from ..quantized.checkpoints import published
from ..quantized.twins import packed

SCRIPT = """
import contextlib, dataclasses, io, json, os, sys
from bigmodel.cli.main import run
from bigmodel.plan.search import search
from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine import probe
from bigmodel.profile.machine.machine import nominal_machine
from bigmodel.profile.machine.timing import Effort
from bigmodel.verify import verify as verifying
from tests.plan.machines import machine

def use_machine(speeds, folder):
    os.environ["XDG_CACHE_HOME"] = folder
    key = probe.machine_key(Effort())
    probe.cache_folder().mkdir(parents=True)
    (probe.cache_folder() / f"{key}.json").write_text(machine_json.dump(dataclasses.replace(speeds, key=key)))

def from_command_line(*arguments):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run(["verify", *arguments, "--json"])
    return {"exit_code": code, "findings": json.loads(output.getvalue())}

search.EXACT = 0  # what is verified need not be the very best plan, and that one is searched for seconds
verifying.REPEATS = 2  # of passes that are timed, when memory has been measured
verifying.WARM_UP_RUNS = 1  # virtual accelerators have no libraries that allocate
folder = sys.argv[1]
use_machine(nominal_machine(), f"{folder}/nominal")
# As many tokens as the model allows: no context length is given.
results = {"llama": from_command_line(f"{folder}/llama", "--max-memory", "0=900KB,cpu=1GB", "--tolerance", "1e9")}
for budget in sys.argv[2:]:
    options = ["--max-memory", f"0={budget},cpu=1GB", "--context", "10", "--batch-size", "2"]
    results[f"mixtral {budget}"] = from_command_line(f"{folder}/mixtral", *options)
quantised = ["--max-memory", "0=200KB,cpu=1GB", "--context", "10"]
results["quantised"] = from_command_line(f"{folder}/quantised", *quantised)
# The link of this machine pays for a prompt and not for a step.
use_machine(machine(link=1e8, host=4e-9), f"{folder}/slow_link")
shapes = {"context_length": 256, "new_tokens": 2, "objective": "throughput"}
plan, findings = verifying.verify(f"{folder}/long", {0: "5300KB", "cpu": "1GB"}, offload="auto", **shapes)
results["per pass"] = {
    "computed_below": len(plan.computed_below), "findings": [dataclasses.asdict(one) for one in findings]
}
print(json.dumps(results))
"""

BUDGETS = some(["720KB", "1100KB"], first=1)
"""Of the mixture's accelerator."""


@pytest.fixture(scope="module")
def results(once: Once) -> dict[str, Any]:
    """The findings of every case, by case."""
    found: dict[str, Any] = once("verify", verified)
    return found


def verified(folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, vocab_size=160,
        max_position_embeddings=20,
    )  # fmt: skip
    long = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, vocab_size=160,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    LlamaForCausalLM(long).save_pretrained(folder / "long")
    mixtral(num_hidden_layers=8).save_pretrained(folder / "mixtral")
    published(folder / "quantised", packed(), vocab_size=256)
    environment = {**os.environ, "BIGMODEL_VIRTUAL": "1", "OMP_NUM_THREADS": "1"}
    done = run(["-c", SCRIPT, folder, *BUDGETS], environment, modules=["bigmodel.verify.verify"])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak(findings: list[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in findings if one["device"] == "virtual:0")


@pytest.mark.slow
def test_the_peak_of_the_accelerator_is_predicted_and_busy_machines_do_not_change_the_exit_code(
    results: dict[str, Any],
) -> None:
    exit_code, findings = results["llama"]["exit_code"], results["llama"]["findings"]
    assert peak(findings)["predicted"] == peak(findings)["measured"]
    assert {one["what"] for one in findings if one["unit"] == "seconds"} == {"prompt", "step"}
    assert exit_code == 0
    assert all(one["spread"] > 0 for one in findings if one["unit"] == "seconds")


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_peak_of_a_streamed_mixture_is_predicted(results: dict[str, Any], budget: str) -> None:
    """Its first weights are on the host, where transformers decodes with another function than on an accelerator."""
    found = peak(results[f"mixtral {budget}"]["findings"])
    assert found["predicted"] == found["measured"]


@pytest.mark.slow
def test_the_peak_of_a_quantised_model_is_predicted(results: dict[str, Any]) -> None:
    found = peak(results["quantised"]["findings"])
    assert found["predicted"] == found["measured"]
    assert results["quantised"]["exit_code"] == 0


@pytest.mark.slow
def test_the_peak_of_a_plan_that_streams_prompts_and_computes_steps_on_the_host_is_predicted(
    results: dict[str, Any],
) -> None:
    found = results["per pass"]
    assert found["computed_below"] > 0
    assert peak(found["findings"])["predicted"] == peak(found["findings"])["measured"]


def test_an_error_is_relative_to_the_measured_value() -> None:
    assert Finding("cpu", "peak memory", "bytes", 90, 100).error == pytest.approx(-0.1)
    assert Finding("cpu", "peak memory", "bytes", 0, 0).error == 0


@pytest.fixture
def _caching() -> Iterator[None]:
    virtual.enable(1, caching=virtual.Caching(workspace=200))
    yield
    virtual.enable(1)
    virtual.disable()


@pytest.mark.usefixtures("_caching")
def test_of_an_accelerator_that_caches_three_peaks_are_compared() -> None:
    """Libraries have their workspace before anything is measured. Two are bounds, which need not be reached."""
    device = DevicePlan(0, None, weights=1024, workspace=200, unused=500)
    plan = Plan("", "", 0, {0: device}, ())
    within = peaks_of_accelerator(plan, "virtual:0", MemoryPeaks(900, 1024, 1500))
    assert [(one.what, one.predicted, one.measured, one.error) for one in within] == [
        ("peak memory, requested", 1024, 900, 0),
        ("peak memory, allocated", 1024, 1024, 0),
        ("peak memory, reserved", 1524, 1500, 0),
    ]
    *_, reserved = peaks_of_accelerator(plan, "virtual:0", MemoryPeaks(900, 1024, 3048))
    assert reserved.error == -0.5
