import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint, mapped_region
from bigmodel.dispatch import source_file
from bigmodel.dispatch.source_file import ReadPolicy, SourceFile, SourceFiles
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


def policy(nbytes: int, free: int, monkeypatch: pytest.MonkeyPatch) -> ReadPolicy:
    monkeypatch.setattr(source_file, "free_memory_bytes", lambda device: free)
    return ReadPolicy(nbytes)


def test_what_fits_into_memory_is_read_through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = policy(100, 1000, monkeypatch)
    assert not any(fits.bypasses(cached=False) for _ in range(100))


def test_what_is_cached_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not policy(1000, 100, monkeypatch).bypasses(cached=True)


@pytest.mark.parametrize("direct_is_faster", [True, False])
def test_what_does_not_fit_is_read_the_faster_way(direct_is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    large = policy(1000, 100, monkeypatch)
    chosen = []
    for _ in range(10 * ReadPolicy.RETRY):
        bypass = large.bypasses(cached=False)
        chosen.append(bypass)
        large.record(bypass, 100, 1.0 if bypass == direct_is_faster else 2.0)
    later = chosen[2 * ReadPolicy.RETRY :]
    assert later.count(direct_is_faster) == len(later) - 8
