"""Comparing the versions of installed packages."""

from __future__ import annotations

import operator
from importlib.metadata import version as installed_version
from typing import Any

import torch
from torch.torch_version import TorchVersion

_OPERATIONS: dict[str, Any] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | TorchVersion, operation: str, requirement_version: str) -> bool:
    """Compare a version, or that of an installed package, with another: ("torch", ">=", "2.4").

    Raises:
        ValueError: an operation other than >, >=, ==, !=, <=, <.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation is {operation!r}; it must be one of {', '.join(_OPERATIONS)}")
    if not isinstance(library_or_version, TorchVersion):
        library_or_version = TorchVersion(installed_version(library_or_version))
    return bool(_OPERATIONS[operation](library_or_version, requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare PyTorch's version, without its build: `is_torch_version(">=", "2.4")`."""
    return compare_versions(TorchVersion(torch.__version__.split("+")[0]), operation, version)


torch_version = TorchVersion(torch.__version__.split("+")[0])
"""PyTorch's version, without its build."""
