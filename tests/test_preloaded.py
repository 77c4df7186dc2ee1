"""Programs of `tests/preloaded.py` are as those of a new interpreter."""

from __future__ import annotations

import os
import sys

import pytest

from tests.preloaded import COLLECTED, run

IN_ENVIRONMENT = "import os, bigmodel.devices; print(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))"


def test_a_program_has_what_imports_add_to_the_environment() -> None:
    """Its own environment lacks it: the process that hands tests to workers does not import the library."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    assert run(["-c", IN_ENVIRONMENT], bare).stdout == "1\n"
    assert run(["-c", IN_ENVIRONMENT], {**bare, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}).stdout == "0\n"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="the run has one process")
def test_processes_of_a_run_ask_one_server(testrun_uid: str) -> None:
    assert os.environ["PYTEST_XDIST_TESTRUNUID"] == testrun_uid


def test_importing_all_tests_starts_no_thread() -> None:
    """The workers of a whole run are forked after that."""
    if COLLECTED not in sys.modules:
        pytest.skip("it is not a run of everything on several processes")
    assert sys.modules[COLLECTED].THREADS == 1
