"""A DeepSpeed configuration, whose "auto" values are filled in later, and placeholders for configured objects."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigmodel.errors import TrainError

AUTO = "auto"


class DeepSpeedConfig:
    """The content of a DeepSpeed configuration.

    Args:
        config_file_or_dict: a dict, the path of a JSON file, JSON itself (perhaps encoded in base64), or another object
            with a `config` dict.

    Attributes:
        config: the nested dict itself.

    Raises:
        TrainError: the file is missing or not JSON.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        source = getattr(config_file_or_dict, "config", config_file_or_dict)
        self.config: dict[str, Any] = copy.deepcopy(source) if isinstance(source, dict) else _read(source)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted name such as "zero_optimization.stage"; `default` if it is missing."""
        node: Any = self.config
        for key in ds_key_long.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict in which a dotted name is looked up, None if there is none, and the name's last part."""
        way, _, last = ds_key_long.rpartition(".")
        node = self.get_value(way) if way else self.config
        return (node if isinstance(node, dict) else None), last

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete what is at a dotted name, if it is there.

        Raises:
            TrainError: it is missing, with `must_exist`.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise TrainError(f"the DeepSpeed configuration has no {ds_key_long}")

    def set_value(self, name: str, value: Any) -> None:
        """Set the value at a dotted name, creating dicts as needed."""
        *way, last = name.split(".")
        node = self.config
        for key in way:
            node = node.setdefault(key, {})
        node[last] = value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value exists and is true."""
        return bool(self.get_value(ds_key_long)) and not self.is_auto(ds_key_long)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value exists and is false."""
        return self.get_value(ds_key_long) is not None and not self.get_value(ds_key_long)

    def fill(self, name: str, value: Any) -> None:
        """Set the value at a dotted name if it is "auto"."""
        if self.is_auto(name):
            self.set_value(name, value)

    def autos(self) -> list[str]:
        """Names of all values that are still "auto"."""
        return [name for name, value in _leaves(self.config, "") if value == AUTO]

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage = self.get_value("zero_optimization.stage", 0)
        return 2 if stage == AUTO else int(stage)

    def set_stage_and_offload(self) -> None:
        """Do nothing, as stage and offloading are read from the configuration whenever they are asked for."""

    def is_zero2(self) -> bool:
        """Whether gradients are sharded and parameters are not."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Whether parameters are sharded."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Whether optimizer state or parameters are stored in RAM or on disk."""
        devices = [self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
        return any(device in ("cpu", "nvme") for device in devices)


def _read(source: str | os.PathLike[str]) -> dict[str, Any]:
    given = _decoded(source) if isinstance(source, str) else None
    if given is not None:
        return given
    path = Path(source)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(f"the DeepSpeed configuration {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainError(f"the DeepSpeed configuration {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TrainError(f"the DeepSpeed configuration {path} must be a JSON object, not a {type(content).__name__}")
    return content


def _decoded(text: str) -> dict[str, Any] | None:
    """Return the JSON object that `text` is, as it stands or base64-encoded; None if it is none."""
    for decoded in (lambda: text, lambda: base64.urlsafe_b64decode(text).decode()):
        with suppress(ValueError):
            content = json.loads(decoded())
            if isinstance(content, dict):
                return content
    return None


def _leaves(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


class DummyOptim:
    """Placeholder for the optimizer in `prepare`, if the DeepSpeed configuration has an `optimizer` section.

    Args:
        params: parameters or parameter groups.
        lr: fills "auto" in that section.
        weight_decay: fills "auto" in that section.
        kwargs: fill "auto" under their own names.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Placeholder for the scheduler in `prepare`, if the DeepSpeed configuration has a `scheduler` section.

    Args:
        optimizer: the optimizer or its placeholder.
        total_num_steps: optimizer steps in all; fills "auto" in that section.
        warmup_num_steps: optimizer steps of the warm-up; fills "auto" in that section.
        lr_scheduler_callable: makes the scheduler from the optimizer, instead of the section.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class EngineScheduler:
    """A DeepSpeed engine's scheduler, which the engine steps by itself."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped its scheduler with its optimizer."""

    def get_lr(self) -> Any:
        """Learning rates, as the scheduler computes them now."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print a learning rate, as the scheduler does."""
        self.scheduler.print_lr(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)
