"""Tiny checkpoints are made once for all questions, and their processes have imported PyTorch already."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from bigmodel.devices import virtual
from tests.preloaded import Program, run

MODULES = ("bigmodel.benchmarks.models", "bigmodel.dispatch.pretrained", "transformers.models.llama.modeling_llama")


class PreloadedSubprocess:
    """Has the names of the module `subprocess` that questions use. Interpreters are forked from one that has imported
    what they need."""

    PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def run(command: Sequence[str], *, env: dict[str, str], capture_output: bool, text: bool, **options: Any) -> Any:
        """Run an interpreter to its end."""
        assert capture_output
        assert text
        return run(command[1:], env, modules=MODULES, **options)

    @classmethod
    def Popen(
        cls,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> Program:
        """Start an interpreter, in the session of the one that it is forked from."""
        nowhere = os.open(os.devnull, os.O_WRONLY)

        def descriptor(given: int | IO[Any] | None, default: int) -> int | None:
            if given is None or isinstance(given, int):
                return {None: default, cls.PIPE: None, cls.DEVNULL: nowhere}[given]
            return given.fileno()

        try:
            return Program(
                command[1:],
                env,
                stdin=stdin == cls.PIPE,
                stdout=descriptor(stdout, 1),
                stderr=descriptor(stderr, 2),
                modules=MODULES,
                pass_fds=pass_fds,
            )
        finally:
            os.close(nowhere)


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where questions keep their checkpoints."""
    return tmp_path_factory.mktemp("workdir")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Questions set threads and virtual accelerators: take that back. Rounds are not repeated for quiet's sake, nor
    run to warm up."""
    harness = importlib.import_module("bigmodel.benchmarks.harness.measure")
    monkeypatch.setattr(harness, "PATIENCE", 1)
    monkeypatch.setattr(harness.measure, "__defaults__", (0, 0))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    virtual.disable()


@pytest.fixture(autouse=True)
def preloaded_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that questions start are forked from one that has imported PyTorch."""
    for name in ("harness.isolate", "gpu", "planning_fuzz", "serve_peer", "stages_peer", "train_scaling"):
        monkeypatch.setattr(importlib.import_module(f"bigmodel.benchmarks.{name}"), "subprocess", PreloadedSubprocess)
