"""Configuration files: locating, reading (accelerate's, too) and writing them, and the default configuration."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ..errors import LaunchError
from . import unsupported
from .options import Option, coerce, nearest, options_of
from .settings import SECTIONS, LaunchConfig


def default_config_path() -> Path:
    """Return the file that `bigmodel config` writes by default: `$XDG_CONFIG_HOME/bigmodel/default_config.yaml`."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "bigmodel" / "default_config.yaml"


def find_default_config() -> Path | None:
    """Return the default configuration file: this library's, else accelerate's; None if neither exists."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    hub_home = Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")
    candidates = [
        default_config_path(),
        hub_home / "accelerate" / "default_config.yaml",
        hub_home / "accelerate" / "default_config.json",
    ]
    return next((path for path in candidates if path.is_file()), None)


def load_config(path: str | Path, overridden: Collection[str] = ()) -> LaunchConfig:
    """Read a YAML or JSON configuration file, accelerate's or ours.

    Args:
        path: the file.
        overridden: names of options that are given elsewhere: their values in the file are not read, and may be none.

    Raises:
        LaunchError: the file is missing or malformed, a key is unknown (the message names the file and the nearest
            known key), a value has the wrong type, or the file requests something that is not supported.
    """
    return read_config(_parse(Path(path)), str(path), overridden)


def read_config(content: dict[str, Any], where: str, overridden: Collection[str] = ()) -> LaunchConfig:
    """Return the configuration that a file holds; `content` is changed.

    Args:
        content: of the file, with sections nested.
        where: what an error names as its place.
        overridden: as for `load_config`.

    Raises:
        LaunchError: a key is unknown, a value has the wrong type, or something is not supported.
    """
    if str(content.pop("compute_environment", "LOCAL_MACHINE")).upper() != "LOCAL_MACHINE":
        raise LaunchError(f"{where}: compute_environment must be LOCAL_MACHINE; {unsupported.KEYS['iam_role_name']}.")
    _modernise(content)
    values: dict[str, Any] = {}
    top = options_of(LaunchConfig)
    for key, value in content.items():
        if unsupported.check_key(key, value, where):
            continue
        if key in SECTIONS:
            values.update(_section(key, value, where, overridden))
        elif key in overridden:
            continue
        elif key in top:
            if key == "distributed_type":
                unsupported.check_distributed_type(value, where)
            values[key] = coerce(top[key], value, where)
        else:
            known = [*top, *SECTIONS, "compute_environment"]
            raise LaunchError(f"{where}: unknown key {key!r}.{nearest(key, known)}")
    return LaunchConfig().replace(values)


def save_config(config: LaunchConfig, path: str | Path) -> Path:
    """Write `config` atomically as YAML (JSON if the name ends in .json), and return the path."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise LaunchError(f"Cannot write the configuration file {path}: {error.strerror}.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_dump(config.to_dict(), path))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def basic_config(mixed_precision: str = "no") -> LaunchConfig:
    """Return the default configuration: one process for each GPU of this machine, or one on the CPU if it has none.

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
    """Write `basic_config` to `save_location` (default: the default configuration file), unless the file exists.

    Returns:
        The path written; None if the file exists, which is not changed.

    Raises:
        LaunchError: it is a folder, or cannot be written.
    """
    path = Path(save_location) if save_location else default_config_path()
    if path.is_dir():
        raise LaunchError(f"Cannot write the configuration file {path}: it is a folder.")
    if path.exists():
        return None
    return save_config(basic_config(mixed_precision), path)


def _dump(content: dict[str, Any], path: Path) -> str:
    if path.suffix == ".json":
        return json.dumps(content, indent=2, sort_keys=True) + "\n"
    return yaml.safe_dump(content, allow_unicode=True, sort_keys=True)


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LaunchError(
            f"The configuration file {path} does not exist. Write one with `bigmodel config --config_file {path}`."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"The configuration file {path} cannot be read: {error}.") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise LaunchError(f"{path} is not valid YAML{place}: {problem}.") from None
    except json.JSONDecodeError as error:
        raise LaunchError(
            f"{path} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise LaunchError(f"{path} must hold `key: value` lines, not a {type(content).__name__}.")
    return content


def _modernise(content: dict[str, Any]) -> None:
    """Rename the keys of old accelerate files to the current ones."""
    if content.pop("fp16", False) and "mixed_precision" not in content:
        content["mixed_precision"] = "fp16"
    backend = content.pop("dynamo_backend", None)
    if backend and str(backend).upper() != "NO":
        content.setdefault("dynamo_config", {"dynamo_backend": backend})


def _section(section: str, content: Any, where: str, overridden: Collection[str]) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise LaunchError(f"{where}: {section} must hold `key: value` lines, not {content!r}.")
    known = options_of(SECTIONS[section])
    prefix = section.removesuffix("config")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if unsupported.check_key(key, value, where):
            continue
        option = _find(key, known, (prefix, section + "_"))
        if option is None:
            raise LaunchError(f"{where}: unknown key {section}.{key}.{nearest(str(key), known)}")
        if option.name not in overridden:
            values[option.name] = coerce(option, value, f"{where}: {section}")
    return values


def _find(key: Any, known: dict[str, Option], prefixes: tuple[str, ...]) -> Option | None:
    """Return the option called `key`, with or without the section's prefix (`fsdp_version`, `version`)."""
    return next((known[name] for name in (str(key), *(p + str(key) for p in prefixes)) if name in known), None)
