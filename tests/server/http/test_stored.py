"""Pages of lists, and errors about bounds as responses."""

from __future__ import annotations

import errno

import pytest

from bigmodel.server.batches.limits import (
    BatchEndedError,
    FileInUseError,
    FileTooLongError,
    StoreFullError,
    TooManyBatchesError,
)
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.stored import page, refusals
from tests.server.batches.making import batch


def test_a_list_comes_in_pages() -> None:
    made = [batch() for _ in range(5)]
    found, after = [], None
    while True:
        shown = page(made, after, 2)
        found += [each["id"] for each in shown["data"]]
        assert (shown["first_id"], shown["last_id"]) == (shown["data"][0]["id"], found[-1])
        after = shown["last_id"]
        if not shown["has_more"]:
            break
    assert found == [each.id for each in made]
    for nothing in (page([], None, 2), page(made, "unknown", 2), page(made, made[-1].id, 2)):
        assert (nothing["data"], nothing["has_more"], nothing["first_id"], nothing["last_id"]) == (
            [],
            False,
            None,
            None,
        )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (FileTooLongError("x"), 413, "body_too_long"),
        (StoreFullError("x"), 413, "storage_full"),
        (FileInUseError("x"), 409, "file_in_use"),
        (TooManyBatchesError("x"), 429, "too_many_batches"),
        (BatchEndedError("x"), 409, "batch_ended"),
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), 413, "storage_full"),
    ],
)
def test_what_passes_a_bound_is_refused(error: Exception, status: int, code: str) -> None:
    with pytest.raises(APIError) as refused, refusals():
        raise error
    assert (refused.value.status, refused.value.code) == (status, code)
    assert "secret" not in refused.value.message
    assert ("Retry-After" in refused.value.headers) == (status == 429)


def test_other_failures_of_a_disk_are_failures_of_the_server() -> None:
    with pytest.raises(PermissionError), refusals():
        raise PermissionError(errno.EACCES, "denied")
