"""Features of accelerate's files and flags that are not supported, and what to use instead."""

from __future__ import annotations

from typing import Any

from ..errors import LaunchError

_TPU = "TPUs are not supported; train on GPUs (MULTI_GPU, FSDP) or on the CPU (MULTI_CPU)"
_MEGATRON = "Megatron-LM is not supported; use FSDP with fsdp_config, or tensor parallelism with parallelism_config"
_SAGEMAKER = "SageMaker is not supported; run `bigmodel launch` on each machine of the job"
_MPI = "mpirun is not supported; run `bigmodel launch` with machine_rank 0, 1, ... on each machine"
_SEQUENCE = "sequence parallelism is not supported; use tp_size or dp_shard_size of parallelism_config"
_POD = "pods are not supported; run `bigmodel launch` on each machine"
_DS_LAUNCHER = "DeepSpeed's own launchers are not used; run `bigmodel launch` on each machine (launcher 'standard')"

DISTRIBUTED_TYPES = {
    "xla": _TPU,
    "tpu": _TPU,
    "megatron_lm": _MEGATRON,
    **{
        f"multi_{name}": f"{name.upper()} devices are not supported; use MULTI_GPU or MULTI_CPU"
        for name in ("npu", "mlu", "musa", "sdaa", "xpu", "hpu", "neuron")
    },
}

# Keys that accelerate writes into every file; accepted while they request nothing.
KEYS = {
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _POD,
    "commands": _POD,
    "megatron_lm_config": _MEGATRON,
    "mpirun_config": _MPI,
    "ec2_instance_type": _SAGEMAKER,
    "iam_role_name": _SAGEMAKER,
    "deepspeed_hostfile": _DS_LAUNCHER,
    "deepspeed_inclusion_filter": _DS_LAUNCHER,
    "deepspeed_exclusion_filter": _DS_LAUNCHER,
    "parallelism_config_sp_seq_length": _SEQUENCE,
    "parallelism_config_sp_seq_length_is_variable": _SEQUENCE,
    "parallelism_config_sp_attn_implementation": _SEQUENCE,
}

_FLAG_PREFIXES = {
    "tpu": _TPU,
    "no_tpu": _TPU,
    "megatron_lm": _MEGATRON,
    "use_megatron_lm": _MEGATRON,
    "mpirun": _MPI,
    "aws": _SAGEMAKER,
    "vm": _POD,
    "env": _POD,
    "deepspeed_hostfile": _DS_LAUNCHER,
    "deepspeed_inclusion_filter": _DS_LAUNCHER,
    "deepspeed_exclusion_filter": _DS_LAUNCHER,
    "parallelism_config_sp_seq": _SEQUENCE,
    "parallelism_config_sp_attn": _SEQUENCE,
}


def check_distributed_type(value: Any, where: str) -> None:
    """Raises LaunchError when `value` names an unsupported kind of training; the message names the alternative."""
    reason = DISTRIBUTED_TYPES.get(str(value).lower())
    if reason:
        raise LaunchError(f"{where}: distributed_type {value}: {reason}.")


def check_key(name: str, value: Any, where: str) -> bool:
    """Whether `name` is an unsupported key that requests nothing. Raises LaunchError when it requests something."""
    reason = KEYS.get(name)
    if reason is None:
        return False
    if _asks_for_something(value):
        raise LaunchError(f"{where}: {name} is {value!r}: {reason}.")
    return True


def check_flag(name: str) -> None:
    """Raises LaunchError when the flag `--name` belongs to an unsupported feature."""
    for prefix, reason in _FLAG_PREFIXES.items():
        if name == prefix or name.startswith(prefix + "_"):
            raise LaunchError(f"--{name}: {reason}.")


def _asks_for_something(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("no", "false", "none", "0", "downcast_bf16")
