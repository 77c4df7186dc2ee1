"""The accelerators that a test runs on: virtual ones on any machine, or CUDA's with ``pytest --device cuda``.

A test that asks for the fixture `every_accelerator` runs on either kind. It names them by `at(0)` and `at(1)`, and
asks `held` what lies on one. What CUDA cannot do is marked: `exact` for limits and counters that only the virtual
accelerator keeps to the byte, `two` for a second accelerator.

A process runs tests of one kind: once the device type of virtual accelerators is registered, PyTorch takes it for the
machine's accelerator, and pins no memory for CUDA.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from bigmodel.devices import accelerators, memory_allocated

NEEDS_VIRTUAL = re.compile(r"""["']virtual["':]""")
"""What modules of tests say that are about virtual accelerators alone."""

exact = pytest.mark.virtual_only("limits and counters that are exact to the byte")
two = pytest.mark.two_accelerators


def at(index: int) -> str:
    """Return the name of the accelerator with this index, as ``"virtual:0"``."""
    return accelerators()[index]


def held(index: int) -> int:
    """Return the bytes of tensors on an accelerator, without what its libraries keep for themselves."""
    gc.collect()
    if at(index).startswith("cuda"):
        torch._C._cuda_clearCublasWorkspaces()
    return memory_allocated(index)


def skip_what_is_missing(kind: str, node: pytest.Item) -> None:
    """Skip a test on CUDA that needs what CUDA, or this machine's, has not got."""
    if kind != "cuda":
        return
    only = node.get_closest_marker("virtual_only")
    if only is not None:
        pytest.skip(f"needs the virtual accelerator: {only.args[0]}")
    if node.get_closest_marker("two_accelerators") is not None and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, this machine has one")


def needs_virtual(module: Path) -> bool:
    """Whether a module of tests names virtual accelerators, and has no test that runs on CUDA's, too."""
    text = module.read_text()
    return NEEDS_VIRTUAL.search(text) is not None and "every_accelerator" not in text
