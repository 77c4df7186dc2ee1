"""Environment variables with which the launcher configures `Accelerator()` in each process."""

from __future__ import annotations

import os
from typing import Any

from .options import as_text, options_of
from .settings import SECTIONS, LaunchConfig

_USED_WITH = {
    "deepspeed_config": ("DEEPSPEED",),
    "fsdp_config": ("FSDP",),
    "fp8_config": None,
    "dynamo_config": None,
    "parallelism_config": None,
}


def launch_environment(config: LaunchConfig, processes_here: int, cpu: bool) -> dict[str, str]:
    """The variables that carry `config` to the training processes, under accelerate's names.

    Args:
        processes_here: processes on this machine, which share its CPU threads.
        cpu: train on the CPU.
    """
    variables: dict[str, str] = {}
    for name, option in options_of(LaunchConfig).items():
        if option.environment:
            variables.update(_one(option.environment, getattr(config, name)))
    variables["ACCELERATE_USE_CPU"] = as_text(cpu)
    variables["ACCELERATE_MIXED_PRECISION"] = config.mixed_precision or "no"
    if config.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    else:
        variables.pop("ACCELERATE_CPU_AFFINITY", None)
    for section, kinds in _USED_WITH.items():
        if kinds is None or config.distributed_type in kinds:
            variables.update(_section(config, section))
    variables.update(_kind(config, cpu))
    if config.gpu_ids and config.gpu_ids.lower() != "all" and not cpu:
        variables["CUDA_VISIBLE_DEVICES"] = config.gpu_ids
    variables["OMP_NUM_THREADS"] = str(_threads(config, processes_here))
    return variables


def _section(config: LaunchConfig, section: str) -> dict[str, str]:
    values = getattr(config, section)
    variables: dict[str, str] = {}
    for name, option in options_of(SECTIONS[section]).items():
        if option.environment:
            variables.update(_one(option.environment, getattr(values, name)))
    if "ACCELERATE_DYNAMO_BACKEND" in variables:
        variables["ACCELERATE_DYNAMO_BACKEND"] = variables["ACCELERATE_DYNAMO_BACKEND"].upper()
    if section == "parallelism_config" and variables:
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return variables


def _kind(config: LaunchConfig, cpu: bool) -> dict[str, str]:
    accumulation = config.deepspeed_config.gradient_accumulation_steps
    variables = _one("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", accumulation)
    if config.distributed_type == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
        variables.setdefault("FSDP_VERSION", str(config.fsdp_config.fsdp_version or 2))
    if config.distributed_type == "DEEPSPEED":
        fields = options_of(SECTIONS["deepspeed_config"])
        named = [name for name in fields if getattr(config.deepspeed_config, name) is not None]
        named += ["mixed_precision"] if config.mixed_precision is not None else []
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        if cpu:
            variables["DS_ACCELERATOR"] = "cpu"
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(named)
    return variables


def _threads(config: LaunchConfig, processes_here: int) -> int:
    """Threads of each process: as configured, else as in the environment, else an equal share of the cores."""
    if config.num_cpu_threads_per_process:
        return config.num_cpu_threads_per_process
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if inherited.isdigit() and int(inherited) > 0:
        return int(inherited)
    return max(1, len(os.sched_getaffinity(0)) // processes_here if hasattr(os, "sched_getaffinity") else 1)


def _one(variable: str, value: Any) -> dict[str, str]:
    return {} if value is None else {variable: as_text(value)}
