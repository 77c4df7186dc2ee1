"""The environment variables through which a launcher configures the processes that it starts.

torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) give a process its rank. The
others have accelerate's names, so that either launcher can start scripts of either library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bigmodel.errors import TrainError

USE_CPU = "ACCELERATE_USE_CPU"
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
GRADIENT_ACCUMULATION_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
USE_MEGATRON_LM = "ACCELERATE_USE_MEGATRON_LM"
USE_SAGEMAKER = "ACCELERATE_USE_SAGEMAKER"
USE_PARALLELISM_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"
DEBUG_MODE = "ACCELERATE_DEBUG_MODE"
DYNAMO_PREFIX = "ACCELERATE_DYNAMO_"
BYPASS_DEVICE_MAP = "ACCELERATE_BYPASS_DEVICE_MAP"
STANDS_IN = "BIGMODEL_COMPAT"
"""Set in a process in which this project stands in for accelerate: scripts that it launches run in the same way."""
TORCH_DEVICE = "ACCELERATE_TORCH_DEVICE"

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off", ""})


def flag(name: str, default: bool = False) -> bool:
    """Return the value of a boolean variable. Raises TrainError if it is not one."""
    value = os.environ.get(name)
    return default if value is None else read_flag(name, value)


def read_flag(name: str, value: str) -> bool:
    """Parse a boolean. Raises TrainError, which contains `name`, if `value` is not one."""
    lowered = value.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise TrainError(f"{name}={value!r} is neither yes nor no; set it to 1 or 0, or unset it")


def integer(name: str, default: int) -> int:
    """Return the value of an integer variable. Raises TrainError if it is not one."""
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise TrainError(f"{name}={value!r} is not a whole number") from None


def text(name: str, default: str) -> str:
    """Return the value of a text variable; an empty one counts as unset."""
    return os.environ.get(name) or default


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` in this process's environment within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
