"""Every strategy on two CPU ranks gives the loss curve of one process, and goes on bitwise from its checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ...launch.starting import launched
from .curve import Model

SCRIPT = Path(__file__).parent / "curve.py"
TOLERANCE = 1e-6
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install bigmodel[deepspeed]"
)
STRATEGIES = {
    "ddp": ["--distributed_type", "MULTI_CPU"],
    "fsdp": ["--use_fsdp"],
    "fsdp_hybrid": ["--use_fsdp", "--fsdp_sharding_strategy=HYBRID_SHARD"],
    "fsdp_one_file": [
        "--use_fsdp",
        "--fsdp_state_dict_type=FULL_STATE_DICT",
        "--fsdp_offload_params=true",
        "--fsdp_activation_checkpointing=true",
        "--fsdp_reshard_after_forward=false",
    ],
    "zero_0": ["--use_deepspeed", "--zero_stage=0"],
    "zero_1": ["--use_deepspeed", "--zero_stage=1"],
    "zero_2_offload": ["--use_deepspeed", "--zero_stage=2", "--offload_optimizer_device=cpu"],
    "zero_3": ["--use_deepspeed", "--zero_stage=3"],
    "zero_3_offload": [
        "--use_deepspeed",
        "--zero_stage=3",
        "--offload_optimizer_device=cpu",
        "--offload_param_device=cpu",
    ],
}


def curve(folder: Path, *flags: str) -> dict[str, Any]:
    done = launched("--cpu", *flags, SCRIPT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "curve.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return curve(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=DEEPSPEED if name.startswith("zero") else ()) for name in STRATEGIES],
)
def test_the_curve_is_that_of_one_process(name: str, alone: dict[str, Any], tmp_path: Path) -> None:
    found = curve(tmp_path, "--num_processes=2", *STRATEGIES[name])
    for step, ((loss, norm), (expected_loss, expected_norm)) in enumerate(
        zip(found["losses"], alone["losses"], strict=True)
    ):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE), f"loss of step {step}"
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE), f"gradient norm of step {step}"
    assert found["resumed"] == found["rest"]
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as exported:
        assert set(exported.keys()) == set(Model().state_dict())
