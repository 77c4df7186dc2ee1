"""`ClusterConfig`: a launch configuration that is made, read and written as accelerate's is."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..launch import LaunchConfig, load_config
from ..launch.config_file import default_config_path, find_default_config, read_config, save_config


class ClusterConfig(LaunchConfig):
    """A `LaunchConfig` made of accelerate's arguments: sections are dicts, or those of a `LaunchConfig`.

    Args:
        options: By name, as in a configuration file. None and empty sections mean "not set".

    Raises:
        LaunchError: An option is unknown, wrong or not supported.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given = {name: _plain(value) for name, value in options.items()}
        content = {name: value for name, value in given.items() if value is not None and value != {}}
        vars(self).update(vars(read_config(content, type(self).__name__)))

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> ClusterConfig:
        """Read a configuration file, YAML or JSON; None means the default one.

        Raises:
            LaunchError: It is missing or damaged.
        """
        read = load_config(yaml_file or find_default_config() or default_config_path())
        return cls(**{each.name: getattr(read, each.name) for each in dataclasses.fields(read)})

    @classmethod
    def from_json_file(cls, json_file: str | Path | None = None) -> ClusterConfig:
        """Read a configuration file as `from_yaml_file` does."""
        return cls.from_yaml_file(json_file)

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the options that are set as YAML.

        Raises:
            LaunchError: The file cannot be written, or its name ends in .json.
        """
        if Path(yaml_file).suffix == ".json":
            raise LaunchError(f"{yaml_file} is the name of a JSON file: use to_json_file")
        save_config(self, yaml_file)

    def to_json_file(self, json_file: str | Path) -> None:
        """Write the options that are set as JSON.

        Raises:
            LaunchError: The file cannot be written, or its name does not end in .json.
        """
        if Path(json_file).suffix != ".json":
            raise LaunchError(f"{json_file} does not end in .json: files of other names are read as YAML")
        save_config(self, json_file)


def _plain(value: Any) -> Any:
    """Return what a configuration file would hold."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return value
