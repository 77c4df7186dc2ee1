"""The interview of `bigmodel config`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bigmodel.errors import LaunchError
from bigmodel.launch import LaunchConfig
from bigmodel.launch.questions import ask_configuration


def answered(monkeypatch: pytest.MonkeyPatch, *answers: str) -> LaunchConfig:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(answer + "\n" for answer in answers)))
    return ask_configuration(Console(file=io.StringIO()))


def test_one_process_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(monkeypatch, "1", "cpu", "ddp", "1", "bf16", "n")
    expected = {"distributed_type": "NO", "num_machines": 1, "num_processes": 1, "use_cpu": True}
    assert found == LaunchConfig(mixed_precision="bf16", **expected)


def test_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["2", "1", "10.0.0.1", "29501", "static", "gpu", "ddp", "4", "0,1", "no", "n"]
    found = answered(monkeypatch, *answers)
    assert (found.distributed_type, found.num_processes, found.machine_rank) == ("MULTI_GPU", 4, 1)
    assert (found.main_process_ip, found.main_process_port, found.gpu_ids) == ("10.0.0.1", 29501, "0,1")


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["1", "cpu", "deepspeed", "", "3", "cpu", "nvme", "n", "y", "/disk", "4", "y", "1.5", "2", "no", "n"]
    found = answered(monkeypatch, *answers)
    assert found.distributed_type == "DEEPSPEED"
    section = found.deepspeed_config
    assert (section.zero_stage, section.offload_optimizer_device, section.offload_param_device) == (3, "cpu", "nvme")
    assert (section.offload_param_nvme_path, section.gradient_accumulation_steps) == ("/disk", 4)
    assert (section.gradient_clipping, section.zero3_save_16bit_model) == (1.5, True)


def test_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["1", "cpu", "fsdp", "size_based_wrap", "y", "n", "1000", "full_state_dict", "y", "2", "no", "y", ""]
    found = answered(monkeypatch, *answers)
    section = found.fsdp_config
    assert (section.fsdp_version, section.fsdp_reshard_after_forward) == (2, "true")
    assert (section.fsdp_auto_wrap_policy, section.fsdp_min_num_params) == ("SIZE_BASED_WRAP", 1000)
    assert (section.fsdp_state_dict_type, section.fsdp_activation_checkpointing) == ("FULL_STATE_DICT", True)
    assert found.dynamo_config.dynamo_backend == "INDUCTOR"


def test_a_wrong_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(monkeypatch, "many", "1", "tpu", "cpu", "tp", "2", "2", "no", "n")
    assert found.distributed_type == "TP"
    assert found.parallelism_config.parallelism_config_tp_size == 2


def test_an_input_that_ends_early_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="input ended before all questions were answered"):
        answered(monkeypatch, "1", "cpu")
