"""Files that weights are read from."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.benchmarks.harness.pagecache import resident_bytes
from bigmodel.checkpoint import Checkpoint, mapped_region, release
from bigmodel.dispatch.transfer.files import SourceFile, SourceFiles
from bigmodel.errors import CheckpointFormatError


def opened(path: Path) -> SourceFile:
    return SourceFile(path, os.open(path, os.O_RDONLY))


def test_bytes_are_read_from_anywhere_and_may_end_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    memory = bytearray(300)
    opened(path).read(memoryview(memory), 50, 150)
    assert memory[:150] == bytes(range(50, 200))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    memory = bytearray(200)
    opened(path).read(memoryview(memory), 0, 200)
    assert memory == bytes(range(200))


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with pytest.raises(CheckpointFormatError, match=r"file: ends at byte 100, but .* up to byte 120"):
        opened(path).read(memoryview(bytearray(120)), 0, 120)


def test_a_file_system_that_cannot_bypass_its_cache_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    file = opened(path)
    preadv = os.preadv

    def refuse_direct(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor != file._descriptor:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    memory = bytearray(8192)
    file.read(memoryview(memory), 0, 5000, bypass=True)
    assert memory[:5000] == b"x" * 5000


def test_a_file_is_opened_once_and_not_at_all_when_another_bears_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10), "b": torch.zeros(10)}, path)
    checkpoint = Checkpoint.open(path)
    first, second = mapped_region(checkpoint.tensor("a")), mapped_region(checkpoint.tensor("b"))
    assert first is not None
    assert second is not None
    files = SourceFiles()
    assert files.get(first) is files.get(second) is not None
    save_file({"a": torch.ones(10)}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    assert SourceFiles().get(first) is None


def test_bytes_are_shown_as_they_lie_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 100)
    shown = opened(path).view_cached(5000, 300)
    assert shown is not None
    assert bytes(shown[:300].tolist()) == (bytes(range(256)) * 100)[5000:5300]


def test_mapped_bytes_are_those_of_the_file_and_count_until_released(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2**20)}, path)
    mine = Checkpoint.open(path).tensor("a")
    mine[5] = 9
    shown = opened(path).view_cached(2**20, 2**20 + 100)
    assert shown is not None
    assert resident_bytes(shown) >= 2**20
    assert not shown.any()
    release(shown)
    assert resident_bytes(shown) == 0
    assert mine[5] == 9


def test_a_file_cut_short_shows_nothing_and_is_told_from_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 20_000)
    file = opened(path)
    assert file.view_cached(10_000, 5_000) is not None
    os.truncate(path, 12_000)
    assert file.view_cached(10_000, 5_000) is None
    file.check_length(12_000)
    with pytest.raises(CheckpointFormatError, match=r"file: ends at byte 12000, but .* up to byte 15000.* cut short"):
        file.check_length(15_000)
