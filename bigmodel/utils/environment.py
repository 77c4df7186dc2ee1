"""Environment variables: reading them as numbers and choices, and changing them temporarily."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from bigmodel.compat.classes import check_cuda_fp8_capability as check_cuda_fp8_capability
from bigmodel.compat.classes import convert_dict_to_env_variables as convert_dict_to_env_variables
from bigmodel.errors import TrainError
from bigmodel.limits import RENDEZVOUS_PORT
from bigmodel.train import environment
from bigmodel.utils.machine import CPUInformation as CPUInformation
from bigmodel.utils.machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from bigmodel.utils.machine import get_cpu_distributed_information as get_cpu_distributed_information
from bigmodel.utils.machine import get_current_device_type as get_current_device_type
from bigmodel.utils.machine import get_driver_version as get_driver_version
from bigmodel.utils.machine import get_gpu_info as get_gpu_info
from bigmodel.utils.machine import get_int_from_env as get_int_from_env
from bigmodel.utils.machine import override_numa_affinity as override_numa_affinity
from bigmodel.utils.machine import set_numa_affinity as set_numa_affinity

F = TypeVar("F", bound=Callable[..., Any])


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read yes or no: 1 or 0, or with `to_bool` True or False. Raises ValueError on anything else."""
    try:
        if not value.strip():
            raise TrainError("the text is empty: it is neither yes nor no")
        answer = environment.read_flag("the text", value)
    except TrainError as error:
        raise ValueError(str(error)) from None
    return answer if to_bool else int(answer)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read a yes-or-no variable. Raises TrainError when its value is neither."""
    return environment.flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Read a variable; return `default` if it is not set."""
    return os.environ.get(key, str(default))


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set variables, their names in upper case, while the body runs; restore them afterwards."""
    with environment.changed_environment({name.upper(): str(value) for name, value in variables.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables while the body runs; restore them afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        _set_all(before)


def purge_accelerate_environment(func_or_cls: F) -> F:
    """Decorate a function, or every method of a class, to remove the ACCELERATE_ variables set during a call."""
    if isinstance(func_or_cls, type):
        for name, method in list(vars(func_or_cls).items()):
            if callable(method) and not name.startswith("__"):
                setattr(func_or_cls, name, purge_accelerate_environment(method))
        return func_or_cls

    @wraps(func_or_cls)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = set(os.environ)
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            for name in set(os.environ) - before:
                if name.startswith("ACCELERATE_"):
                    del os.environ[name]

    return run  # type: ignore[return-value]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of these libraries have been imported."""
    return [name for name in library_names if name in sys.modules]


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a process listens on this local port; 29500 by default."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("localhost", int(port or RENDEZVOUS_PORT))) == 0


def _set_all(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
