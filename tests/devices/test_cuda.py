"""The tests that ask for every kind of accelerator run on CUDA's too, where the machine has some."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import accelerators, memory_allocated

from ..accelerators import KINDS


def test_tests_run_on_virtual_accelerators_on_every_machine(every_accelerator: str) -> None:
    assert accelerators()[0] == f"{every_accelerator}:0"
    before = memory_allocated(0)
    held = torch.empty(1024, dtype=torch.uint8, device=accelerators()[0])
    assert memory_allocated(0) - before == held.nbytes


def test_tests_run_on_cuda_where_there_is_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU; this machine has none, so only virtual accelerators are tested")
    assert KINDS == ["virtual", "cuda"]
