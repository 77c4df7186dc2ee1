import subprocess
import sys

import pytest
import torch

from bigmodel.devices import free_memory_bytes, max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.errors import DeviceError

MB = 2**20

HIGH_WATER_MARK = """
import torch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

MB = 2**20
reset_peak_memory("cpu")
before = memory_allocated("cpu")
block = torch.ones(64 * MB, dtype=torch.uint8)
with_block = memory_allocated("cpu")
del block
assert with_block - before > 60 * MB
assert max_memory_allocated("cpu") >= with_block - 4 * MB
reset_peak_memory("cpu")
assert max_memory_allocated("cpu") < with_block - 32 * MB
"""


@pytest.mark.slow
def test_the_host_is_measured_by_the_kernels_high_water_mark() -> None:
    # In a process of its own: in a large one the kernel may take pages away meanwhile.
    subprocess.run([sys.executable, "-c", HIGH_WATER_MARK], check=True)


@pytest.mark.usefixtures("accelerators")
def test_an_accelerator_counts_what_tensors_hold() -> None:
    virtual.configure(0, 10 * MB)
    a = torch.ones(MB, dtype=torch.uint8, device="virtual:0")
    b = a + 1
    assert memory_allocated(0) == 2 * MB
    assert free_memory_bytes(0) == 8 * MB
    del b
    assert memory_allocated(0) == MB
    assert max_memory_allocated(0) == 2 * MB
    reset_peak_memory(0)
    assert max_memory_allocated(0) == MB
    assert memory_allocated(1) == 0


def test_the_disk_has_no_memory_of_its_own() -> None:
    with pytest.raises(DeviceError):
        memory_allocated("meta")
