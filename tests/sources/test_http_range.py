from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bigmodel.sources.http_range import read_range
from tests.profile.hub_server import COMMIT, HubServer

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    (tmp_path / "team" / "x").mkdir(parents=True)
    (tmp_path / "team" / "x" / "file").write_bytes(CONTENT)
    with HubServer(tmp_path) as server:
        yield server


@pytest.mark.parametrize("ignore_ranges", [False, True], ids=["ranges", "whole_file"])
@pytest.mark.parametrize(("start", "count"), [(0, 10), (300, 5), (1000, 100), (0, 5000)])
def test_a_part_of_a_file_and_its_size(hub: HubServer, start: int, count: int, ignore_ranges: bool) -> None:
    hub.ignore_ranges = ignore_ranges
    content, size = read_range(f"{hub.address}/team/x/resolve/{COMMIT}/file", False, start, count)
    assert content == CONTENT[start : start + count]
    assert size == len(CONTENT)


def test_only_what_is_asked_for_is_sent(hub: HubServer) -> None:
    read_range(f"{hub.address}/team/x/resolve/{COMMIT}/file", False, 100, 7)
    assert hub.sent == {"file": 7}


def test_a_busy_server_is_asked_again(hub: HubServer) -> None:
    hub.refuse["file"] = 1
    assert read_range(f"{hub.address}/team/x/resolve/{COMMIT}/file", False, 0, 3)[0] == CONTENT[:3]
    assert hub.requests == ["GET file"] * 2
