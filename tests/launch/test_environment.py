"""What the launcher tells the processes it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.launch import LaunchConfig, load_config
from bigmodel.launch.environment import launch_environment

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture(autouse=True)
def no_threads_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_precision_and_device() -> None:
    found = launch_environment(load_config(CONFIGS / "two_processes_fp16.yaml"), 2, cpu=False)
    assert found["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert found["ACCELERATE_USE_CPU"] == "false"
    assert not any("DEEPSPEED" in name or "FSDP" in name for name in found)


def test_deepspeed_under_accelerates_names() -> None:
    found = launch_environment(load_config(CONFIGS / "deepspeed_stage_3.yaml"), 2, cpu=True)
    assert found["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert found["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "none"
    assert found["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
    assert "zero_stage" in found["ACCELERATE_CONFIG_DS_FIELDS"].split(",")
    assert found["DS_ACCELERATOR"] == "cpu"


def test_fsdp_under_accelerates_names() -> None:
    changes = {
        "distributed_type": "FSDP",
        "fsdp_offload_params": True,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    found = launch_environment(LaunchConfig().replace(changes), 2, cpu=False)
    assert found["ACCELERATE_USE_FSDP"] == "true"
    assert (found["FSDP_VERSION"], found["FSDP_OFFLOAD_PARAMS"]) == ("2", "true")
    assert found["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"


def test_a_section_that_is_not_used_is_not_passed_on() -> None:
    config = LaunchConfig(distributed_type="MULTI_GPU").replace({"fsdp_offload_params": True, "zero_stage": 3})
    found = launch_environment(config, 2, cpu=False)
    assert not any(name.startswith(("FSDP", "ACCELERATE_DEEPSPEED")) for name in found)


def test_parallelism_and_compilation() -> None:
    config = LaunchConfig().replace({"parallelism_config_tp_size": 2, "dynamo_backend": "inductor"})
    found = launch_environment(config, 2, cpu=False)
    assert found["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert found["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert found["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def test_gpus_are_made_visible_only_when_some_are_chosen() -> None:
    assert launch_environment(LaunchConfig(gpu_ids="1,3"), 2, cpu=False)["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in launch_environment(LaunchConfig(gpu_ids="all"), 2, cpu=False)
    assert "CUDA_VISIBLE_DEVICES" not in launch_environment(LaunchConfig(gpu_ids="0"), 2, cpu=True)


def test_threads_as_set_or_inherited_or_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LaunchConfig(num_cpu_threads_per_process=3)
    assert launch_environment(config, 1, cpu=True)["OMP_NUM_THREADS"] == "3"
    assert int(launch_environment(LaunchConfig(), 1000, cpu=True)["OMP_NUM_THREADS"]) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch_environment(LaunchConfig(), 1, cpu=True)["OMP_NUM_THREADS"] == "5"
