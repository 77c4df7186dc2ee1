"""A plugin of pytest: `pytest -p bigmodel.compat.pytest_plugin` tests with this project standing in for accelerate.

Given with ``-p``, it installs before any ``conftest.py`` is imported.
"""

from __future__ import annotations

from typing import Any

import pytest

from .reporting import report
from .stand_in import VERSION, install


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install."""
    install()


def pytest_report_header() -> str:
    """Say in the header of the run which accelerate is tested with."""
    return f"accelerate: {VERSION}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With ``-v``, print the report at the end."""
    if terminalreporter.verbosity > 0:
        terminalreporter.section("bigmodel.compat")
        terminalreporter.write_line(report())
