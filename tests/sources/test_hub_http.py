from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.errors as hub
import pytest

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.sources.hub_http import UnreachableError, hub_endpoint, hub_errors, read_range
from tests.profile.hub_server import COMMIT, HubServer


def http_error(kind: type[hub.HfHubHTTPError]) -> hub.HfHubHTTPError:
    """An error as huggingface_hub raises it, without the response that one of its releases insists on."""
    error: Any = kind.__new__(kind)
    Exception.__init__(error, "said the server")
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("raised", "becomes", "message"),
    [
        (hub.HFValidationError("bad name"), CheckpointNotFoundError, "'team/x' is neither an existing path nor"),
        (http_error(hub.GatedRepoError), CheckpointNotFoundError, "access must be granted first"),
        (http_error(hub.RepositoryNotFoundError), CheckpointNotFoundError, "nor a repository at"),
        (http_error(hub.RevisionNotFoundError), CheckpointNotFoundError, "no branch, tag or commit 'v1'"),
        (hub.LocalEntryNotFoundError("not cached"), UnreachableError, "cannot be reached"),
        (hub.OfflineModeIsEnabled("offline"), UnreachableError, "cannot be reached"),
        (http_error(hub.RemoteEntryNotFoundError), CheckpointNotFoundError, "lacks a file that its index names"),
        (http_error(hub.HfHubHTTPError), CheckpointError, "refused the request"),
        (hub.HfHubHTTPError.__bases__[0]("connection refused"), UnreachableError, "connection refused"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_the_hub_refuses_is_said_as_one_of_ours(
    raised: Exception, becomes: type[CheckpointError], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught, hub_errors("team/x", "v1"):
        raise raised
    assert type(caught.value) is becomes
    assert caught.value.__cause__ is raised


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), hub_errors("team/x", None):
        raise ZeroDivisionError


def test_the_endpoint_is_read_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example/")
    assert hub_endpoint() == "http://mirror.example"
    monkeypatch.delenv("HF_ENDPOINT")
    assert hub_endpoint().startswith("http")


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


def test_a_busy_server_is_asked_again(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the two
    hub.refuse["file"] = 1
    assert read_range(f"{hub.address}/team/x/resolve/{COMMIT}/file", False, 0, 3)[0] == CONTENT[:3]
    assert hub.requests == ["GET file"] * 2
