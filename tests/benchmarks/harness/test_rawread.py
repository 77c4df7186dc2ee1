"""Raw readers read everything, to the last odd byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bigmodel.benchmarks.harness.rawread import READERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: O_DIRECT and MADV_POPULATE_READ")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_reader_reads_all_bytes_of_all_files(name: str, tmp_path: Path) -> None:
    sizes = [3 * 2**20, 9 * 2**20 + 777, 5]
    files = [tmp_path / str(size) for size in sizes]
    for file, size in zip(files, sizes):
        file.write_bytes(os.urandom(size))
    assert READERS[name](files) == sum(sizes)


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        READERS[name]([tmp_path / "nothing"])
