"""Files of a training checkpoint: written so that they are there whole or not at all, read without running code."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigmodel.atomic_files import written_atomically
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError, TrainError

multiarray: Any = import_module("numpy._core.multiarray" if np.__version__ >= "2" else "numpy.core.multiarray")
_NUMPY_GLOBALS: list[Any] = [
    multiarray.scalar,
    multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(name)) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "bool")},
]


def numbered(name: str, index: int) -> str:
    """Return "optimizer.bin" for 0, "optimizer_1.bin" for 1, and so on."""
    stem, dot, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{ending}"


def save_object(obj: Any, path: Path) -> None:
    """Write an object of tensors, numbers, strings and containers of them.

    Raises TrainError when it holds something that could not be read back without running code.
    """
    with written_atomically(path) as file:
        torch.save(obj, file)
        file.flush()
        _check_readable(path, Path(file.name))


def _check_readable(path: Path, written: Path) -> None:
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(written)
    allowed = {f"{item.__module__}.{item.__qualname__}" for item in _NUMPY_GLOBALS}
    refused = [name for name in refused if name not in allowed]
    if refused:
        raise TrainError(
            f"{path.name} would hold objects of {', '.join(refused)}, which are not read back for safety; "
            "keep tensors, numbers and strings in state_dict, "
            "or allow the class with torch.serialization.add_safe_globals"
        )


def load_object(path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read what `save_object` wrote. No code in the file is run.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: the file is damaged, or holds objects that are not allowed.
    """
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path} is not there")
    try:
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # the reader of a damaged file fails in any way: it looks up what is not there, and so on
        raise CheckpointFormatError(f"{path} cannot be read: {error}") from error


def save_any(obj: Any, path: Path) -> None:
    """Write any object in `torch.save`'s format, for users to read as they please."""
    with written_atomically(path) as file:
        torch.save(obj, file)
