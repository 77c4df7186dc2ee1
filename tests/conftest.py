"""What a test run begins with: options, the environment, and the plugin of what all tests share.

With `-n` the process that hands tests out runs none: it does without the plugin, which imports PyTorch. Those that run
them are forked from the server of `tests/preloaded.py`, which has imported what they need. Programs that tests start
have the same environment.
"""

from __future__ import annotations

import gc
import os
import secrets
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest

gc.disable()  # until tests are collected: importing and collecting make millions of objects, and hardly any garbage
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in programs that tests start: more would wait for each other
# Virtual accelerators punish what CUDA would, in programs that tests start, too.
os.environ.setdefault("BIGMODEL_VIRTUAL_STRICT", "late")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Plans go by what was measured of the machine, if it was: here they are those of one that nobody has measured.
    _cache = tempfile.TemporaryDirectory(prefix="bigmodel-cache-")
    os.environ["XDG_CACHE_HOME"] = _cache.name


WORKERS_IMPORT = (
    "anthropic.types.beta",
    "bigmodel.server.http.app",
    "bigmodel.server.http.run",
    "compressed_tensors",
    "deepspeed",  # transformers imports it wherever a model is saved
    "fastapi",
    "httpx",
    "peft",
    "openai.types",
    "schemathesis",
    "tensorboard.backend.event_processing.event_file_loader",
    "torch.distributed.tensor",
    "torchmetrics",
    "transformers.conversion_mapping",
    "transformers.distributed.checkpoint",
    "transformers.integrations.finegrained_fp8",
    "transformers.integrations.flash_attention",
    "transformers.models.llama.modeling_llama",
    "xgrammar",
)
"""What modules of tests import: seconds of every worker's start. None of these modules starts a thread."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("virtual", "cuda", "stand-in"),
        default="virtual",
        help="accelerators of the tests; stand-in: the tests for cuda, on strict virtual ones that stay enabled",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if getattr(config.option, "testrunuid", "") is None and not is_worker:
        # Its workers, and what they start, find the server of this run by its name.
        config.option.testrunuid = os.environ["PYTEST_XDIST_TESTRUNUID"] = secrets.token_hex()
    names_profile = config.getoption("hypothesis_profile", None) is not None  # the plugin registers them
    if is_worker or names_profile or config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("tests.shared")
    else:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers of a run that does not use CUDA: those that are to run everything with all tests imported."""
    if config.getoption("--device") == "cuda":
        return
    from tests.preloaded import COLLECTED, python_executable, run

    is_of_everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    names_profile = config.getoption("hypothesis_profile", None) is not None  # modules read it
    collects_all = is_of_everything and config.getoption("--device") == "virtual" and not names_profile
    if collects_all:
        run(["-c", ""], modules=WORKERS_IMPORT)  # the server of all programs has them, and the workers' comes from it
    python = python_executable(*WORKERS_IMPORT, prelude=COLLECTED if collects_all else "")
    for spec in specs:
        spec.python = str(python)
