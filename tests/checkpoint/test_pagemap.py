from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import pagemap
from bigmodel.checkpoint.mapping import MappedFile
from bigmodel.checkpoint.pagemap import has_private_page

PAGE = mmap.PAGESIZE
PAGES = 40


@pytest.fixture(params=["scanned", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As kernels since 6.7 tell, and as older ones do: page by page, here seven at a time."""
    if request.param == "read":
        monkeypatch.setattr(pagemap, "_libc", None)
        monkeypatch.setattr(pagemap, "_ENTRIES", 7)
    return str(request.param)


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """A private map of a file."""
    path = tmp_path / "pages.bin"
    path.write_bytes(bytes(range(256)) * (PAGES * PAGE // 256))
    return MappedFile(path).tensor(torch.uint8, (PAGES * PAGE,), 0)


def private(tensor: torch.Tensor, first: int = 0, last: int = PAGES) -> bool:
    return has_private_page(tensor.data_ptr() + first * PAGE, tensor.data_ptr() + last * PAGE)


@pytest.mark.usefixtures("way")
def test_a_page_that_was_not_touched_is_the_files(mapped: torch.Tensor) -> None:
    assert not private(mapped)


@pytest.mark.usefixtures("way")
def test_a_page_that_was_read_is_the_files(mapped: torch.Tensor) -> None:
    assert mapped.sum() > 0
    assert not private(mapped)


@pytest.mark.parametrize("page", [0, 20, PAGES - 1])
@pytest.mark.usefixtures("way")
def test_a_page_that_was_written_to_is_not(mapped: torch.Tensor, page: int) -> None:
    mapped[page * PAGE + 5] = 1
    assert private(mapped)
    assert private(mapped, page, page + 1)
    assert not private(mapped, 0, page)
    assert not private(mapped, page + 1, PAGES)


@pytest.mark.usefixtures("way")
def test_a_byte_written_with_the_value_it_had_makes_its_page_private(mapped: torch.Tensor) -> None:
    mapped[PAGE] = mapped[PAGE].item()
    assert private(mapped)
