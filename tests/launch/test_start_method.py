"""Forks where they can train, fresh interpreters where the function can be sent there, else an error that helps."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from bigmodel.errors import LaunchError
from bigmodel.launch import notebook_launcher, start_method
from tests.preloaded import run

from .conftest import Forked

ASKED = """
import torch
from bigmodel.launch.start_method import why_not_fork

def asked():
    raise RuntimeError("CUDA error: initialization error")

torch.cuda.is_available = lambda: True
torch.cuda.is_current_stream_capturing = asked
print(why_not_fork(cpu=True))
"""


@pytest.fixture
def cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.slow
def test_a_backward_pass_with_device_threads_rules_out_forks(forked: Forked) -> None:
    assert "started autograd's device threads" in forked.outcomes["why not"]


@pytest.mark.slow
def test_a_function_without_a_name_needs_a_fork(forked: Forked) -> None:
    message = forked.outcomes["lambda"]
    assert message.startswith("LaunchError: A backward pass already ran in this process")
    assert "cannot be pickled" in message
    assert "bigmodel launch" in message


def test_a_function_of_a_module_is_sent_to_fresh_processes(cuda_was_used: None) -> None:
    assert start_method.start_method(print, (), cpu=False) == "spawn"


def test_a_notebook_that_has_used_cuda_is_told_what_to_do(cuda_was_used: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def train() -> None: ...

    train.__module__ = "__main__"
    with pytest.raises(LaunchError, match="CUDA was already used in this process") as caught:
        notebook_launcher(train, num_processes=2, cpu=False)
    assert "train is defined in the notebook" in str(caught.value)
    assert "Restart the notebook" in str(caught.value)


@pytest.mark.slow
def test_a_fork_in_which_an_optimizer_could_not_ask_cuda_is_not_tried() -> None:
    done = run(["-c", ASKED])
    assert "CUDA's driver was already asked" in done.stdout, done.stderr


@pytest.mark.slow
def test_cuda_is_no_obstacle_to_training_on_the_cpu(forked: Forked, cuda_was_used: None) -> None:
    assert "CUDA" not in (start_method.why_not_fork(cpu=True) or "")
