"""The tests that ask for every kind of accelerator run on CUDA's too, where the machine has some."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import accelerators, memory_allocated
from tests.preloaded import run


def test_tests_run_on_the_accelerators_that_were_asked_for(every_accelerator: str) -> None:
    assert accelerators()[0] == f"{every_accelerator}:0"
    before = memory_allocated(0)
    held = torch.empty(1024, dtype=torch.uint8, device=accelerators()[0])
    assert memory_allocated(0) - before == held.nbytes


@pytest.mark.slow
def test_a_process_that_tests_cuda_never_registers_the_virtual_device_type() -> None:
    """Else PyTorch would ask it for pinned memory. The tests of dispatch, training and loading are among the listed."""
    rooms = ["tests/dispatch/streaming", "tests/devices", "tests/train/data/test_loader.py"]
    arguments = ["--device", "cuda", "--collect-only", "-p", "no:cacheprovider", *rooms]
    code = (
        "import sys, pytest, torch\n"
        f"code = pytest.main({arguments!r})\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "sys.exit(code)\n"
    )
    ran = run(["-c", code])
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "tests/dispatch/streaming/test_gradients.py" in ran.stdout
    assert "tests/train/data/test_loader.py" in ran.stdout
    assert "tests/devices/virtual/test_tensor.py" not in ran.stdout
