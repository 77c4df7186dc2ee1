"""Files of keys and values: what is written is read, space is reserved and given back, and no file has a name."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.streaming.kv_file import KVDisk
from bigmodel.errors import DispatchError
from bigmodel.limits import FILE_ALIGNMENT


def test_a_range_has_what_was_written_and_gives_its_space_back(tmp_path: Path) -> None:
    disk = KVDisk(tmp_path, 3 * FILE_ALIGNMENT)
    place, other = disk.take(100), disk.take(FILE_ALIGNMENT + 1)
    values = torch.arange(20, dtype=torch.float32)
    place.write(8, values)
    other.write(0, -values)
    assert torch.equal(place.view(8, torch.float32, (4, 5)), values.view(4, 5))
    assert torch.equal(other.view(0, torch.float32, (20,)), -values)
    assert not os.listdir(tmp_path)
    assert disk.files[0].space == 3 * FILE_ALIGNMENT
    del place, other
    gc.collect()
    assert disk.files[0].space == 0
    assert disk.take(3 * FILE_ALIGNMENT).nbytes == 3 * FILE_ALIGNMENT, "its ranges are one again"


def test_more_than_was_planned_goes_to_another_file(tmp_path: Path) -> None:
    disk = KVDisk(tmp_path, FILE_ALIGNMENT)
    kept = [disk.take(FILE_ALIGNMENT), disk.take(2 * FILE_ALIGNMENT)]
    assert [file.space for file in disk.files] == [kept[0].nbytes, kept[1].nbytes]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DispatchError, match="file"):
        KVDisk(tmp_path / "file", 1).take(1)
