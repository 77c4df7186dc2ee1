"""What is not offered is refused with what to use instead."""

from __future__ import annotations

import pytest

from bigmodel.errors import LaunchError
from bigmodel.launch import parse_launch
from bigmodel.launch.unsupported import check_distributed_type, check_flag, check_key


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("XLA", "train on GPUs"), ("TPU", "train on GPUs"), ("MEGATRON_LM", "use FSDP"), ("MULTI_NPU", "use MULTI_GPU")],
)
def test_kinds_of_training_that_are_not_offered(kind: str, instead: str) -> None:
    with pytest.raises(LaunchError, match=f"config.yaml: distributed_type {kind}: .*not supported; .*{instead}"):
        check_distributed_type(kind, "config.yaml")
    check_distributed_type("MULTI_GPU", "config.yaml")


@pytest.mark.parametrize("value", [None, False, [], "no", "false", {}, 0])
def test_keys_that_ask_for_nothing_are_passed_over(value: object) -> None:
    assert check_key("tpu_use_cluster", value, "config.yaml")
    assert not check_key("num_processes", value, "config.yaml")


def test_keys_that_ask_for_something_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"megatron_lm_config is .*: Megatron-LM is not supported; use FSDP"):
        check_key("megatron_lm_config", {"megatron_lm_tp_degree": 2}, "config.yaml")


@pytest.mark.parametrize(
    "flag", ["tpu", "use_megatron_lm", "megatron_lm_tp_degree", "aws_access_key_id", "mpirun_hostfile"]
)
def test_flags_are_refused_with_and_without_hyphens(flag: str) -> None:
    with pytest.raises(LaunchError, match=f"--{flag}: .*not supported"):
        check_flag(flag)
    with pytest.raises(LaunchError, match="not supported"):
        parse_launch([f"--{flag.replace('_', '-')}", "script.py"])
