from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigmodel.devices.cgroup import free_bytes, limit_bytes, usable_cores


def second(folder: Path, limit: str, used: int, stat: str | None = None) -> Path:
    """A group of version 2."""
    return group(folder, ("memory.max", limit), ("memory.current", used), stat)


def first(folder: Path, limit: int, used: int, stat: str | None = None) -> Path:
    """A group of version 1."""
    return group(folder, ("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", used), stat)


def group(folder: Path, limit: tuple[str, object], used: tuple[str, int], stat: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (limit, used):
        (folder / name).write_text(f"{value}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)
    return folder


def member(folder: Path, *lines: str) -> Path:
    """The file that says of which groups a process is."""
    path = folder / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_limit_less_what_is_used(tmp_path: Path) -> None:
    assert free_bytes(second(tmp_path, "1000", 300)) == 700


def test_cached_files_can_be_had(tmp_path: Path) -> None:
    stat = "anon 100\nfile 600\nshmem 50\ninactive_file 400\nactive_file 150\nslab_reclaimable 20\n"
    assert free_bytes(second(tmp_path, "1000", 900, stat)) == 1000 - (900 - 400 - 150 - 20)


@pytest.mark.parametrize("used", [1000, 1200])
def test_a_full_group_has_nothing(tmp_path: Path, used: int) -> None:
    assert free_bytes(second(tmp_path, "1000", used)) == 0


def test_without_a_limit_or_a_group_there_is_no_answer(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    assert free_bytes(second(tmp_path, "max", 300)) is None
    first(tmp_path / "memory", 9223372036854771712, 300)
    assert free_bytes(tmp_path) is None


def test_version_one_has_other_names_and_counts_the_groups_within(tmp_path: Path) -> None:
    stat = "cache 1\ninactive_file 1\ntotal_inactive_file 400\ntotal_active_file 150\n"
    first(tmp_path / "memory", 1000, 900, stat)
    assert free_bytes(tmp_path, member(tmp_path, "4:cpu,memory:/", "0::/")) == 1000 - (900 - 400 - 150)


@pytest.mark.parametrize(("make", "mount", "line"), [(second, "", "0::/a/b"), (first, "memory", "9:memory,cpu:/a/b")])
def test_the_least_of_a_group_and_of_those_around_it_counts(
    tmp_path: Path, make: object, mount: str, line: str
) -> None:
    for path, limit in (("", 5000), ("a", 900), ("a/b", 1000), ("other", 10)):
        make(tmp_path / mount / path, limit, 300)  # type: ignore[operator]
    assert free_bytes(tmp_path, member(tmp_path, line)) == 600
    (tmp_path / mount / "a" / ("memory.max" if make is second else "memory.limit_in_bytes")).unlink()
    assert free_bytes(tmp_path, member(tmp_path, line)) == 700


@pytest.mark.parametrize("path", ["/docker/0123", "/../elsewhere"])
def test_in_a_container_the_mount_is_the_group_that_the_host_names(tmp_path: Path, path: str) -> None:
    first(tmp_path / "memory", 1000, 300)
    first(tmp_path / "elsewhere", 10, 0)  # outside the mount
    assert free_bytes(tmp_path, member(tmp_path, f"4:memory:{path}")) == 700


def test_a_group_without_a_list_of_members_is_that_of_the_mount(tmp_path: Path) -> None:
    assert free_bytes(second(tmp_path, "1000", 300), tmp_path / "nowhere") == 700


def test_a_limit_holds_for_the_groups_within_whatever_is_used(tmp_path: Path) -> None:
    assert limit_bytes(tmp_path) is None
    second(tmp_path, "1000", 300)
    assert limit_bytes(tmp_path) == 1000
    second(tmp_path / "inner", "max", 300)
    assert limit_bytes(tmp_path, member(tmp_path, "0::/inner")) == 1000
    second(tmp_path / "inner", "400", 300)
    assert limit_bytes(tmp_path, member(tmp_path, "0::/inner")) == 400


def test_no_more_cores_are_usable_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
