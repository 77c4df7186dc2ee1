"""What a test run begins with: options, the environment, and the plugin of what all tests share.

With `-n` the process that hands tests out runs none: it does without the plugin, which imports PyTorch. Programs that
tests start have the same environment.
"""

from __future__ import annotations

import gc
import os
import tempfile

import pytest

gc.disable()  # until tests are collected: importing and collecting make millions of objects, and hardly any garbage
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in programs that tests start: more would wait for each other
# Virtual accelerators punish what CUDA would, in programs that tests start, too.
os.environ.setdefault("BIGMODEL_VIRTUAL_STRICT", "late")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Plans go by what was measured of the machine, if it was: here they are those of one that nobody has measured.
    _cache = tempfile.TemporaryDirectory(prefix="bigmodel-cache-")
    os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("virtual", "cuda", "stand-in"),
        default="virtual",
        help="accelerators of the tests; stand-in: the tests for cuda, on strict virtual ones that stay enabled",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    names_profile = config.getoption("hypothesis_profile", None) is not None  # the plugin registers them
    if is_worker or names_profile or config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("tests.shared")
    else:
        gc.enable()
