"""A command says nothing that libraries say about themselves, and everything else that they say."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from bigmodel.cli.quiet import quieten


@pytest.mark.parametrize(
    ("logger", "noise"),
    [
        ("torchao", "Failed to load /some/kernels.so: Could not load this library"),
        ("torch.utils._pytree", "Calling register_constant() on Enum subclasses is deprecated"),
    ],
)
def test_noise_is_left_out_and_the_rest_is_not(logger: str, noise: str, caplog: pytest.LogCaptureFixture) -> None:
    source = logging.getLogger(logger)
    before = list(source.filters)
    quieten()
    quieten()
    assert len(source.filters) <= len(before) + 1
    # Handed to the filters: torch's own loggers do not pass on what a test could see otherwise.
    records = [source.makeRecord(logger, logging.WARNING, "", 0, text, (), None) for text in (noise, "a real warning")]
    assert [bool(source.filter(record)) for record in records] == [False, True]
    source.filters = before


@pytest.mark.slow
def test_importing_what_a_command_needs_says_nothing() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    script = "from bigmodel.cli.quiet import quieten; quieten(); import torchao"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
