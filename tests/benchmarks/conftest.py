"""Tiny checkpoints are made once for all questions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bigmodel.devices import virtual


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where questions keep their checkpoints."""
    return tmp_path_factory.mktemp("workdir")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Questions set threads and virtual accelerators: take that back. Rounds are not repeated for quiet's sake."""
    monkeypatch.setattr(importlib.import_module("bigmodel.benchmarks.harness.measure"), "PATIENCE", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    virtual.disable()
