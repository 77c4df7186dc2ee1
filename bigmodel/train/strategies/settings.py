"""What a strategy may know of the run it works in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class StrategySettings:
    """One run, as its strategy sees it.

    Attributes:
        device: the device of this process.
        num_processes: ranks in the job; `process_index` and `local_process_index` are this process's numbers.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        gradient_accumulation_steps: backward passes to one optimizer step when the strategy was made.
        plugin: the plugin of the strategy (`FullyShardedDataParallelPlugin`, `DeepSpeedPlugin`, ...), or None.
        parallelism_config: the `ParallelismConfig` given to the Accelerator, or None.
        device_mesh: the mesh built from it, or None.
        handlers: the `kwargs_handlers` given to the Accelerator, by class.
    """

    device: torch.device
    num_processes: int = 1
    process_index: int = 0
    local_process_index: int = 0
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    plugin: Any = None
    parallelism_config: Any = None
    device_mesh: Any = None
    handlers: dict[type, Any] = field(default_factory=dict)
