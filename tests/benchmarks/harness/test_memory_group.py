"""Control groups that limit a process's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigmodel.benchmarks.harness.errors import BenchmarkError
from bigmodel.benchmarks.harness.memory_group import memory_group

MIB = 2**20
JOINED = "import sys; open(sys.argv[1], 'w').write(str(__import__('os').getpid())); "

READ_TWICE = """
import psutil
for _ in range(2):
    with open(sys.argv[2], "rb") as file:
        while file.read(2**20):
            pass
print(psutil.Process().io_counters().read_bytes)
"""


def can_limit() -> bool:
    """Whether control groups can be made here."""
    try:
        with memory_group(64 * MIB):
            return True
    except BenchmarkError:
        return False


needs_groups = pytest.mark.skipif(not can_limit(), reason="control groups cannot be made here (root, Linux)")


@needs_groups
def test_files_beyond_the_limit_do_not_stay_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(128 * MIB))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with memory_group(64 * MIB) as group:
        done = subprocess.run(
            [sys.executable, "-c", JOINED + READ_TWICE, str(group), str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert int(done.stdout) > 1.9 * 128 * MIB
    assert not group.parent.exists()


@needs_groups
def test_a_process_that_takes_more_is_ended() -> None:
    with memory_group(64 * MIB) as group:
        done = subprocess.run([sys.executable, "-c", JOINED + "bytearray(128 * 2**20)", str(group)], check=False)
    assert done.returncode == -9


def test_without_permission_the_error_says_what_to_do(tmp_path: Path) -> None:
    says = r"allows no control group with a limit of memory.*run as root on Linux"
    with pytest.raises(BenchmarkError, match=says), memory_group(MIB, root=tmp_path / "nowhere"):
        pass
    with pytest.raises(BenchmarkError, match="memory cannot be limited"), memory_group(MIB, root=tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
