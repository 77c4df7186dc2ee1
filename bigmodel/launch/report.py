"""The output of `bigmodel env`: versions, the machine and the active configuration, for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import yaml

import bigmodel

from ..errors import LaunchError
from .config_file import find_default_config, load_config

_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "deepspeed", "peft", "numpy")


def environment_report(config_file: str | Path | None = None) -> str:
    """Versions, machine and configuration as lines of Markdown.

    Args:
        config_file: the configuration to show; default: the default one, if there is one.
    """
    lines = [f"- `bigmodel` version: {bigmodel.__version__}"]
    lines += [f"- Platform: {platform.platform()}", f"- Python version: {platform.python_version()}"]
    lines += [f"- Python executable: {sys.executable}"]
    lines += [f"- {name} version: {_version(name)}" for name in _PACKAGES]
    lines += _machine()
    lines += _configuration(config_file)
    return "\n".join(lines)


def _version(package: str) -> str:
    if package == "torch":
        import torch

        return str(torch.__version__)  # with its build, as in 2.11.0+cu130, which the package's metadata may lack
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> list[str]:
    import torch

    from ..devices import format_size
    from ..devices.memory import physical_bytes

    lines = [f"- CPU cores: {os.cpu_count()}", f"- System RAM: {format_size(physical_bytes())}"]
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"- GPU {index}: {properties.name}, {format_size(properties.total_memory)}")
    if not count:
        lines.append("- GPU: none" + (", MPS available" if torch.backends.mps.is_available() else ""))
    lines.append(f"- CUDA of torch: {torch.version.cuda or 'none'}")
    return lines


def _configuration(config_file: str | Path | None) -> list[str]:
    path = Path(config_file) if config_file else find_default_config()
    if path is None:
        return ["- Default configuration: none"]
    try:
        content = yaml.safe_dump(load_config(path).to_dict(), sort_keys=True, allow_unicode=True)
    except LaunchError as error:
        return [f"- Configuration {path}: {error}"]
    return [f"- Configuration {path}:", *(f"\t- {line}" for line in content.splitlines())]
