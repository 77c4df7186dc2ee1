"""Launch: configuration files, and starting training scripts on processes, GPUs and machines."""

from __future__ import annotations

from .config_file import default_config_path, find_default_config, load_config, save_config
from .flags import Launch, build_parser, parse_launch
from .job import run
from .notebook import debug_launcher, notebook_launcher
from .settings import LaunchConfig

__all__ = [
    "Launch",
    "LaunchConfig",
    "build_parser",
    "debug_launcher",
    "default_config_path",
    "find_default_config",
    "load_config",
    "notebook_launcher",
    "parse_launch",
    "run",
    "save_config",
]
