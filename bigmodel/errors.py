"""The tree of exceptions that bigmodel raises.

    BigModelError
    ├── DeviceError             a device that is unknown, absent, or does not support an operation
    ├── RaceError               a strict virtual accelerator: work of two streams that no event orders
    ├── SizeError               a size or budget that cannot be read ("10 GiBs", -1)
    ├── PlanError               no plan can be made from the arguments
    │   ├── DeviceMapError      a device map that does not cover the model, or names unknown modules
    │   └── BudgetError         the model does not fit; the message names budgets that would do
    ├── CheckpointError         a checkpoint is invalid; the model is unchanged
    │   ├── CheckpointNotFoundError
    │   ├── CheckpointFormatError   truncated, overlapping, out of range, or not a checkpoint
    │   └── CheckpointMismatchError   missing or unexpected key, wrong shape, wrong dtype
    ├── DispatchError           an operation that needs `undispatch` first
    │   └── KVDiskError         keys and values cannot be written to disk, or read from it
    ├── TrainError              training functions were called out of order or on the wrong device
    ├── LaunchError             a launch configuration that cannot be run
    ├── ServeError              the server could not start, or its engine failed
    │   └── NodeLostError       a process that computes a part of the model no longer answers
    └── CompatError             standing in for accelerate is not possible any more

Classes inherit from the built-in exceptions that accelerate raises in the same cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BigModelError(Exception):
    """Base class of all exceptions of bigmodel."""


class DeviceError(BigModelError, ValueError):
    """A device that is unknown, absent, or asked for something it cannot do."""


class RaceError(BigModelError, RuntimeError):
    """Work of two streams, or of a stream and the host, uses the same memory and no event orders it."""


class SizeError(BigModelError, ValueError):
    """A size or memory budget that cannot be read."""


class PlanError(BigModelError, ValueError):
    """No plan can be made from what was given."""


class DeviceMapError(PlanError):
    """A device map that does not cover the model, or names modules or devices that are not there."""


class BudgetError(PlanError):
    """The model does not fit the budgets. The message says by how many bytes and what would do.

    Args:
        message: what it says, or a function that returns it, called once when the message is read. What would do takes
            a search, and the planner's searches catch many of these errors without reading them.
    """

    def __init__(self, message: str | Callable[[], str] = "") -> None:
        super().__init__(message)

    def _read(self) -> None:
        if self.args and callable(self.args[0]):
            self.args = (self.args[0](),)

    def __str__(self) -> str:
        self._read()
        return super().__str__()

    def __repr__(self) -> str:
        self._read()
        return super().__repr__()

    def __reduce__(self) -> str | tuple[Any, ...]:
        self._read()
        return super().__reduce__()


class CheckpointError(BigModelError):
    """Something is wrong with a checkpoint. The model it was meant for is left as it was."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint, or a file its index names, is not there."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The bytes on disk are not the checkpoint they claim to be."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is sound but does not match the model: keys, shapes or dtypes differ."""


class DispatchError(BigModelError, RuntimeError):
    """A dispatched model does not support the operation while it is dispatched."""


class KVDiskError(DispatchError):
    """Keys and values cannot be written to the disk that the plan has them on, or read from it.

    Attributes:
        why: The reason alone, without names of this machine.
    """

    def __init__(self, message: str, why: str = "the disk failed") -> None:
        super().__init__(message)
        self.why = why


class TrainError(BigModelError, RuntimeError, ValueError):
    """Training functions were called out of order or with unsupported arguments."""


class LaunchError(BigModelError, ValueError):
    """A launch configuration that cannot be run."""


class ServeError(BigModelError, RuntimeError):
    """The server could not start, or its engine failed."""


class NodeLostError(ServeError):
    """A process that computes a part of the model no longer answers: what it computed with others is lost."""


class CompatError(BigModelError, ImportError):
    """Standing in for accelerate is not possible any more: a library that asks for it is imported already."""
