"""`LaunchConfig`: the typed configuration of a launch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .options import Option, option, options_of
from .sections import DeepSpeedSection, DynamoSection, Fp8Section, FsdpSection, ParallelismSection

DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP", "TP")
MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")

SECTIONS: dict[str, type] = {
    "deepspeed_config": DeepSpeedSection,
    "fsdp_config": FsdpSection,
    "parallelism_config": ParallelismSection,
    "dynamo_config": DynamoSection,
    "fp8_config": Fp8Section,
}


@dataclass
class LaunchConfig:
    """A launch configuration with accelerate's names. None means "not set": the default then depends on the machine.

    `num_processes` counts all machines together, as in accelerate. `main_process_port` None lets a single machine
    pick a free port.
    """

    distributed_type: str | None = option(None, "Kind of distributed training.", choices=DISTRIBUTED_TYPES)
    mixed_precision: str | None = option(
        None, "Precision of forward and backward.", env="ACCELERATE_MIXED_PRECISION", choices=MIXED_PRECISIONS
    )
    use_cpu: bool | None = option(None, "Train on the CPU, over gloo.", env="ACCELERATE_USE_CPU", switch=True)
    num_processes: int | None = option(None, "Processes in total, over all machines.")
    num_machines: int | None = option(None, "Machines that take part.")
    machine_rank: int | None = option(None, "The number of this machine, from 0.")
    main_process_ip: str | None = option(None, "Address of machine 0.")
    main_process_port: int | None = option(None, "Port on machine 0 where the processes meet.")
    gpu_ids: str | None = option(None, "GPUs of this machine to use: 'all' or '0,1'.")
    rdzv_backend: str | None = option(None, "Rendezvous: static or c10d.")
    rdzv_conf: str | None = option(None, "Further rendezvous settings: key=value,key=value.")
    same_network: bool | None = option(None, "The machines share a local network.", switch=True)
    max_restarts: int | None = option(None, "Times that the processes are restarted after a failure.")
    monitor_interval: float | None = option(None, "Seconds between checks of the processes.")
    num_cpu_threads_per_process: int | None = option(None, "CPU threads of each process.")
    enable_cpu_affinity: bool | None = option(
        None,
        "Bind each process to the CPU cores nearest its GPU.",
        env="ACCELERATE_CPU_AFFINITY",
        switch=True,
    )
    debug: bool | None = option(
        None,
        "Check shapes across processes and show the launcher's own log.",
        env="ACCELERATE_DEBUG_MODE",
        switch=True,
    )
    log_dir: str | None = option(None, "Folder for the output of each process.")
    tee: str | None = option(None, "Also show that output: 1 stdout, 2 stderr, 3 both.")
    role: str | None = option(None, "Name of the processes in log lines.")
    main_training_function: str | None = option(None, "Accepted and unused: only TPU launchers call it.")
    downcast_bf16: bool | None = option(None, "Accepted and unused: only TPUs downcast.", switch=True)
    deepspeed_config: DeepSpeedSection = field(default_factory=DeepSpeedSection)
    fsdp_config: FsdpSection = field(default_factory=FsdpSection)
    parallelism_config: ParallelismSection = field(default_factory=ParallelismSection)
    dynamo_config: DynamoSection = field(default_factory=DynamoSection)
    fp8_config: Fp8Section = field(default_factory=Fp8Section)

    def replace(self, changes: dict[str, Any]) -> LaunchConfig:
        """A copy in which each option named in `changes` (of the top level or of a section) has the given value."""
        copy = dataclasses.replace(self, **{name: dataclasses.replace(getattr(self, name)) for name in SECTIONS})
        for name, value in changes.items():
            setattr(copy.owner(name), name, value)
        return copy

    def owner(self, name: str) -> Any:
        """The dataclass (this one or a section of it) that has the option `name`."""
        for section, cls in SECTIONS.items():
            if name in options_of(cls):
                return getattr(self, section)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Contents of a configuration file: every option that is set, with sections nested."""
        found: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
        for name in options_of(LaunchConfig):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        for section in SECTIONS:
            values = {k: v for k, v in dataclasses.asdict(getattr(self, section)).items() if v is not None}
            if values:
                found[section] = values
        return found


def all_options() -> dict[str, Option]:
    """Every option, of the top level and of each section, by name: the names are unique."""
    found = dict(options_of(LaunchConfig))
    for cls in SECTIONS.values():
        found.update(options_of(cls))
    return found
