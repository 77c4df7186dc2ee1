"""Processes that multiprocessing starts: those that begin as fresh interpreters install the stand-in, too.

Such a process first reads data about its parent. An object in it installs when it is unpickled, before the process
imports the program. Forked processes need nothing.
"""

from __future__ import annotations

import functools
from multiprocessing import spawn
from typing import Any


class _Installs:
    def __reduce__(self) -> tuple[Any, ...]:
        return _install, ()


def _install() -> None:
    from .stand_in import install

    install()


def inherit() -> None:
    """Have processes that are spawned from now on install the stand-in."""
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def with_installation(name: str) -> dict[str, Any]:
        return {"bigmodel_compat": _Installs(), **original(name)}

    spawn.get_preparation_data = with_installation
