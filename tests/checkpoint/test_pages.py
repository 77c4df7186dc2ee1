from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.checkpoint import are_untouched, is_untouched, pages, populate, release
from bigmodel.checkpoint.mapping import MappedFile
from bigmodel.checkpoint.pages import empty_host, has_private_page
from bigmodel.errors import CheckpointError
from tests.checkpoint.helpers import same_bits

PAGE = mmap.PAGESIZE
PAGES = 64


@pytest.fixture
def mapped(tmp_path: Path) -> MappedFile:
    path = tmp_path / "pages.bin"
    path.write_bytes(bytes(range(256)) * (PAGES * PAGE // 256))
    return MappedFile(path)


def resident_pages(tensor: torch.Tensor) -> int:
    """Pages behind `tensor` that are in this process's page table, by the kernel's own account."""
    start, end = pages.pages_of(tensor)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // PAGE * 8)
        raw = pagemap.read((end - start) // PAGE * 8)
    return sum(raw[i + 7] >> 7 for i in range(0, len(raw), 8))


def test_populating_brings_every_page_in(mapped: MappedFile) -> None:
    tensors = [mapped.tensor(torch.float32, (PAGE,), offset * PAGE + 8) for offset in (40, 2, 20)]
    populate(tensors)
    assert [resident_pages(tensor) for tensor in tensors] == [5, 5, 5]


def test_populating_nothing_is_nothing(mapped: MappedFile) -> None:
    populate([])
    populate([mapped.tensor(torch.float32, (0,), 0)])


def test_where_the_kernel_knows_no_populating_pages_are_touched(
    mapped: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_libc", None)
    tensor = mapped.tensor(torch.float32, (4 * PAGE,), 8)
    populate([tensor])
    assert resident_pages(tensor) == 17


def test_a_file_that_was_cut_short_is_an_error_not_a_crash(mapped: MappedFile) -> None:
    tensor = mapped.tensor(torch.uint8, (8 * PAGE,), 32 * PAGE)
    with mapped.path.open("r+b") as file:
        file.truncate(16 * PAGE)
    with pytest.raises(CheckpointError, match="mapped checkpoint cannot be read"):
        populate([tensor])


def test_an_interrupted_call_is_made_again(mapped: MappedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [errno.EINTR, errno.EINTR, 0]
    asked: list[tuple[int, int]] = []

    def advise(start: int, size: int, _: int) -> int:
        asked.append((start, size))
        return problems.pop(0)

    monkeypatch.setattr(pages, "_advise", advise)
    populate([mapped.tensor(torch.uint8, (PAGE,), 0)])
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_released_pages_are_gone_and_come_back(mapped: MappedFile) -> None:
    tensor = mapped.tensor(torch.uint8, (4 * PAGE,), PAGE + 100)
    neighbour = mapped.tensor(torch.uint8, (100,), PAGE)
    populate([tensor, neighbour])
    expected = tensor.clone()
    release(tensor)
    assert resident_pages(tensor) <= 2, "the pages it shares with its neighbours stay"
    assert resident_pages(neighbour) == 1
    assert same_bits(tensor, expected)


def test_a_change_is_seen_by_whatever_way_it_was_made(mapped: MappedFile) -> None:
    tensor = mapped.tensor(torch.float32, (10, PAGE), 0)
    assert is_untouched(tensor)
    populate([tensor])
    assert is_untouched(tensor)
    parameter = torch.nn.Parameter(tensor)
    parameter.data[7].zero_()
    assert not is_untouched(tensor)
    assert not is_untouched(parameter)
    assert is_untouched(tensor[0:3])
    assert not is_untouched(tensor[7])
    assert is_untouched(mapped.tensor(torch.float32, (0,), 0))


def test_tensors_side_by_side_take_one_question_and_a_change_of_any_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "three"
    path.write_bytes(bytes(3 * PAGE))
    mapped = MappedFile(path)
    tensors = [mapped.tensor(torch.uint8, (PAGE,), n * PAGE) for n in (2, 0, 1)]
    asked = []
    library = pages._brief
    assert library is not None

    class Counted:
        def ioctl(self, *arguments: Any) -> int:
            asked.append(arguments)
            return int(library.ioctl(*arguments))

    monkeypatch.setattr(pages, "_brief", Counted())
    assert are_untouched(tensors)
    assert len(asked) == 1
    assert are_untouched([])
    tensors[1][-1] = 1
    assert not are_untouched(tensors)
    assert are_untouched(tensors[::2])


def test_without_the_kernel_s_word_nothing_counts_as_untouched(
    mapped: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.open", refuse)
    assert not is_untouched(mapped.tensor(torch.uint8, (8,), 0))


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (3, 2**20)])
def test_host_memory_has_the_shape_and_dtype_that_was_asked_for(shape: tuple[int, ...]) -> None:
    tensor = empty_host(shape, torch.bfloat16)
    tensor.fill_(1)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)


def test_memory_between_two_files_need_not_be_mapped(tmp_path: Path) -> None:
    for attempt in range(40):
        maps = []
        for part in range(3):
            path = tmp_path / f"{attempt}-{part}"
            path.write_bytes(bytes(4096))
            maps.append(torch.from_file(str(path), shared=False, size=4096, dtype=torch.uint8))
        del maps[1]
        populate(maps)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_large_ranges_are_read_onto_huge_pages_and_small_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(2 * pages.HUGE_PAGES_AT_LEAST))
    mapped = MappedFile(path)
    rows = mapped.tensor(torch.uint8, (PAGE,), pages.HUGE_PAGES_AT_LEAST + 2 * PAGE)
    populate([rows])
    assert "hg" not in kernel_flags(rows)
    whole = mapped.tensor(torch.uint8, (pages.HUGE_PAGES_AT_LEAST,), 0)
    populate([whole])
    assert "hg" in kernel_flags(whole)
    assert "hg" not in kernel_flags(rows)


def kernel_flags(tensor: torch.Tensor) -> list[str]:
    """What the kernel notes of the part of the map that `tensor` lies in, as two-letter words."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the tensor lies in no map")


@pytest.fixture(params=["scanned", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As kernels since 6.7 tell, and as older ones do: page by page, here seven at a time."""
    if request.param == "read":
        monkeypatch.setattr(pages, "_libc", None)
        monkeypatch.setattr(pages, "_ENTRIES", 7)
    return str(request.param)


@pytest.fixture
def shown_map(tmp_path: Path) -> torch.Tensor:
    """A private map of a file."""
    path = tmp_path / "pages.bin"
    path.write_bytes(bytes(range(256)) * (PAGES * PAGE // 256))
    return MappedFile(path).tensor(torch.uint8, (PAGES * PAGE,), 0)


def private(tensor: torch.Tensor, first: int = 0, last: int = PAGES) -> bool:
    return has_private_page([(tensor.data_ptr() + first * PAGE, tensor.data_ptr() + last * PAGE)])


@pytest.mark.usefixtures("way")
def test_a_page_that_was_not_touched_is_the_files(shown_map: torch.Tensor) -> None:
    assert not private(shown_map)


@pytest.mark.usefixtures("way")
def test_a_page_that_was_read_is_the_files(shown_map: torch.Tensor) -> None:
    assert shown_map.sum() > 0
    assert not private(shown_map)


@pytest.mark.parametrize("page", [0, 20, PAGES - 1])
@pytest.mark.usefixtures("way")
def test_a_page_that_was_written_to_is_not(shown_map: torch.Tensor, page: int) -> None:
    shown_map[page * PAGE + 5] = 1
    assert private(shown_map)
    assert private(shown_map, page, page + 1)
    assert not private(shown_map, 0, page)
    assert not private(shown_map, page + 1, PAGES)


@pytest.mark.usefixtures("way")
def test_a_byte_written_with_the_value_it_had_makes_its_page_private(shown_map: torch.Tensor) -> None:
    shown_map[PAGE] = shown_map[PAGE].item()
    assert private(shown_map)
