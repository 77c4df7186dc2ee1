from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import mapped_region
from bigmodel.checkpoint.mapping import MappedFile
from bigmodel.errors import CheckpointError
from tests.checkpoint.helpers import DTYPES, descriptors_of, maps_of, random_tensor, same_bits


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(i * 7 % 251 for i in range(3 * mmap.PAGESIZE)))
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 13], ids=["start", "aligned", "unaligned"])
def test_a_tensor_shows_the_bytes_of_the_file(tmp_path: Path, dtype: torch.dtype, offset: int) -> None:
    expected = random_tensor(dtype, (3, 5), seed=1)
    content = bytes(expected.reshape(-1).view(torch.uint8).tolist())
    path = tmp_path / "t.bin"
    path.write_bytes(b"\xff" * offset + content + b"\xff" * 9)
    assert same_bits(MappedFile(path).tensor(dtype, (3, 5), offset), expected)


def test_writing_to_a_tensor_never_reaches_the_file(file: Path) -> None:
    before = file.read_bytes()
    mapped = MappedFile(file)
    tensor = mapped.tensor(torch.float32, (16, 16), 64)
    tensor.fill_(1)
    nn.Parameter(tensor).data.mul_(3)
    assert file.read_bytes() == before
    assert mapped.tensor(torch.float32, (16, 16), 64)[3, 3] == 3, "one map, so every view sees the change"


def test_each_tensor_has_a_storage_of_its_own_size(file: Path) -> None:
    mapped = MappedFile(file)
    first, second = mapped.tensor(torch.float32, (4,), 0), mapped.tensor(torch.float32, (8,), 16)
    assert first.untyped_storage().nbytes() == 16
    assert second.untyped_storage().nbytes() == 32
    assert second.data_ptr() == first.data_ptr() + 16
    assert not first._is_view()


def test_an_unaligned_tensor_is_a_copy(file: Path) -> None:
    tensor = MappedFile(file).tensor(torch.float32, (4,), 2)
    assert mapped_region(tensor) is None
    assert tensor.data_ptr() % 4 == 0


def test_the_region_of_a_tensor_is_found_however_it_is_looked_at(file: Path) -> None:
    tensor = MappedFile(file).tensor(torch.int16, (10, 6), 100)
    parameter = nn.Parameter(tensor, requires_grad=False)
    for seen in (
        tensor,
        parameter,
        parameter.data,
        tensor.view(60),
        tensor.t(),
        tensor.detach(),
        tensor.view(torch.int8),
    ):
        region = mapped_region(seen)
        assert region is not None
        assert (region.path, region.offset, region.nbytes) == (file, 100, 120)
    part = mapped_region(tensor[2:4, 1:3])
    assert part is not None
    assert (part.offset, part.nbytes) == (100 + 2 * (2 * 6 + 1), 2 * (6 + 2))


def test_tensors_that_are_not_mapped_have_no_region(file: Path) -> None:
    mapped = MappedFile(file)
    assert mapped_region(torch.zeros(3)) is None
    assert mapped_region(torch.zeros(3, device="meta")) is None
    assert mapped_region(mapped.tensor(torch.float32, (3,), 0).clone()) is None
    assert mapped_region(mapped.tensor(torch.float32, (0, 3), 0)) is None
    assert mapped_region(MappedFile(file, track=False).tensor(torch.float32, (3,), 0)) is None


def test_maps_and_descriptors_go_with_the_last_tensor(file: Path) -> None:
    mapped = MappedFile(file)
    tensors = [mapped.tensor(torch.float32, (4,), 16 * i) for i in range(10)]
    assert (maps_of(file), descriptors_of(file)) == (1, 0)
    del mapped
    parameter = nn.Parameter(tensors[3])
    tensors.clear()
    assert maps_of(file) == 1
    del parameter
    assert maps_of(file) == 0


def test_a_file_larger_than_the_machine_s_memory_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with path.open("wb") as handle:
        handle.truncate(size)
    tensor = MappedFile(path).tensor(torch.uint8, (size,), 0)
    tensor[-1] = 7
    assert tensor[-1] == 7


def test_a_region_opens_the_file_that_was_mapped_or_none(file: Path) -> None:
    tensor = MappedFile(file).tensor(torch.uint8, (8,), 24)
    region = mapped_region(tensor)
    assert region is not None

    descriptor = region.open()
    assert descriptor is not None
    assert os.pread(descriptor, 8, region.offset) == bytes(tensor.tolist())
    os.close(descriptor)

    other = file.with_suffix(".new")
    other.write_bytes(b"\0" * file.stat().st_size)
    os.replace(other, file)
    assert region.open() is None, "another file bears the name"
    file.unlink()
    assert region.open() is None
    assert descriptors_of(file.parent) == 0


def test_a_file_that_cannot_be_mapped_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="empty: 0 bytes cannot be mapped"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none")


def test_threads_may_map_and_let_go_at_the_same_time(file: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                tensor = MappedFile(file).tensor(torch.uint8, (100,), 50)
                region = mapped_region(tensor)
                assert region is not None
                assert region.offset == 50
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert maps_of(file) == 0
