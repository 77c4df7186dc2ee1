from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.devices.cgroup import free_bytes


def group(folder: Path, limit: str, used: int, stat: str | None = None) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)
    return folder


def test_the_limit_less_what_is_used(tmp_path: Path) -> None:
    assert free_bytes(group(tmp_path, "1000", 300)) == 700


def test_cached_files_can_be_had(tmp_path: Path) -> None:
    stat = "anon 100\nfile 600\nshmem 50\ninactive_file 400\nactive_file 150\nslab_reclaimable 20\n"
    assert free_bytes(group(tmp_path, "1000", 900, stat)) == 1000 - (900 - 400 - 150 - 20)


@pytest.mark.parametrize("used", [1000, 1200])
def test_a_full_group_has_nothing(tmp_path: Path, used: int) -> None:
    assert free_bytes(group(tmp_path, "1000", used)) == 0


def test_without_a_limit_or_a_group_there_is_no_answer(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    assert free_bytes(group(tmp_path, "max", 300)) is None
