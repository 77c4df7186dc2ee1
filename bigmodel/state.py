"""The names of ``accelerate.state``: what a process knows of its run."""

import threading
from typing import Any

from bigmodel.train import AcceleratorState as AcceleratorState
from bigmodel.train import DistributedType as DistributedType
from bigmodel.train import GradientState as GradientState
from bigmodel.train import PartialState as PartialState


def is_initialized() -> bool:
    """Whether an `AcceleratorState` has been made in this process."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


class ThreadLocalSharedDict(threading.local):
    """A class attribute that is a dict of each thread's own, shared by all instances there."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: Any, objtype: Any = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: Any, value: dict[Any, Any]) -> None:
        self._storage = value


SharedDict = dict
"""The kind of dict that states are kept in: one for all threads."""
