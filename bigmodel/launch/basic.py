"""The default configuration for this machine, written without asking questions."""

from __future__ import annotations

from pathlib import Path

from .config_file import default_config_path, save_config
from .options import coerce, options_of
from .settings import LaunchConfig


def basic_config(mixed_precision: str = "no") -> LaunchConfig:
    """One process for each GPU of this machine, or one on the CPU when it has none.

    Raises:
        LaunchError: `mixed_precision` is not one of no, fp16, bf16, fp8.
    """
    import torch

    gpus = torch.cuda.device_count()
    option = options_of(LaunchConfig)["mixed_precision"]
    return LaunchConfig(
        distributed_type="MULTI_GPU" if gpus > 1 else "NO",
        mixed_precision=coerce(option, mixed_precision, "bigmodel config"),
        use_cpu=gpus == 0,
        num_processes=max(1, gpus),
        num_machines=1,
        machine_rank=0,
        gpu_ids="all" if gpus else None,
    )


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | None:
    """Write `basic_config` to `save_location` (default: the default configuration file), unless it exists.

    Returns:
        The path written; None if the file exists already, which is not changed.
    """
    path = Path(save_location) if save_location else default_config_path()
    if path.exists():
        return None
    return save_config(basic_config(mixed_precision), path)
