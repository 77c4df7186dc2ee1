"""Everything bigmodel raises on purpose, as one tree.

    BigModelError
    ├── DeviceError             a device that is unknown, absent, or asked for something it cannot do
    ├── SizeError               a size or budget that cannot be read ("10 GiBs", -1)
    ├── PlanError               no plan can be made from what was given
    │   ├── DeviceMapError      a device map that does not cover the model or names what is not there
    │   └── BudgetError         the model does not fit; says by how much and what would do
    ├── CheckpointError         something is wrong with a checkpoint; the model is left as it was
    │   ├── CheckpointNotFoundError
    │   ├── CheckpointFormatError   truncated, overlapping, out of range, not a checkpoint at all
    │   └── CheckpointMismatchError   missing or unexpected key, wrong shape, wrong dtype
    ├── DispatchError           a dispatched model was asked for something that needs `undispatch` first
    ├── TrainError              the training side was used out of order or on the wrong device
    ├── LaunchError             a launch configuration that cannot be run
    └── ServeError              the server could not start, or its engine failed

Where a caller of accelerate would expect a built-in type, the class inherits from it too.
"""

from __future__ import annotations


class BigModelError(Exception):
    """Base of every exception raised on purpose by bigmodel."""


class DeviceError(BigModelError, ValueError):
    """A device that is unknown, absent, or asked for something it cannot do."""


class SizeError(BigModelError, ValueError):
    """A size or memory budget that cannot be read."""


class PlanError(BigModelError, ValueError):
    """No plan can be made from what was given."""


class DeviceMapError(PlanError):
    """A device map that does not cover the model, or names modules or devices that are not there."""


class BudgetError(PlanError):
    """The model does not fit the budgets. The message says by how many bytes and what would do."""


class CheckpointError(BigModelError):
    """Something is wrong with a checkpoint. The model it was meant for is left as it was."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint, or a file its index names, is not there."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The bytes on disk are not the checkpoint they claim to be."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is sound but does not match the model: keys, shapes or dtypes differ."""


class DispatchError(BigModelError, RuntimeError):
    """A dispatched model was asked for something it cannot do while dispatched."""


class TrainError(BigModelError, RuntimeError):
    """The training side was used out of order or with something it does not support."""


class LaunchError(BigModelError, ValueError):
    """A launch configuration that cannot be run."""


class ServeError(BigModelError, RuntimeError):
    """The server could not start, or its engine failed."""
