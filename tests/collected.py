"""The modules of tests, imported once for all workers of a run of everything, as pytest imports them.

A worker would take as long for them as for many tests. The server that they are forked from (`tests/preloaded.py`)
imports this module first. What cannot be imported here fails, or is skipped, in the workers.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from bigmodel.devices import virtual
from tests.preloaded import _silenced

ROOM = Path(__file__).parent


def _import_tests() -> None:
    os.environ.setdefault("PYTEST_XDIST_WORKER", "all")  # the process that hands tests out has made what workers share
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or the first text that is read starts threads
    hook = install_importhook(get_config())
    hook.mark_rewrite("tests.shared")
    try:
        import_module("tests.conftest")
        import_module("tests.shared")
        virtual.enable(count=1)  # modules name the device type
        virtual.disable()
        for path in sorted(ROOM.rglob("test_*.py")):
            with suppress(Exception, pytest.skip.Exception):
                import_module(".".join(path.relative_to(ROOM.parent).with_suffix("").parts))
    finally:
        sys.meta_path.remove(hook)


with _silenced():  # what libraries say of models that modules make
    _import_tests()
THREADS = len(os.listdir("/proc/self/task"))
"""More than one: a fork would lose them."""
