"""What the routes of files and of batches share: whose they are, what there is not, and pages of a list."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Protocol

from fastapi import Request as HTTPRequest

from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import (
    BatchEndedError,
    FileInUseError,
    FileTooLongError,
    StoreFullError,
    TooManyBatchesError,
)
from bigmodel.server.http.client_limits import KEY
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.state import state_of

_REFUSALS: Mapping[type[Exception], tuple[int, str]] = {
    FileTooLongError: (413, "body_too_long"),
    StoreFullError: (413, "storage_full"),
    FileInUseError: (409, "file_in_use"),
    TooManyBatchesError: (429, "too_many_batches"),
    BatchEndedError: (409, "batch_ended"),
}


def batches_for(http: HTTPRequest) -> Batches:
    """The files and batches of the server; 404 where it keeps none."""
    found = state_of(http).batches
    if found is None:
        raise APIError(404, "this server keeps no files: it is one of several replicas", code="unsupported_endpoint")
    return found


def owner_of(http: HTTPRequest) -> str:
    """Whose files and batches a request is about: those of its key."""
    return str(http.scope.get(KEY, ""))


def missing(kind: str, name: str, param: str) -> APIError:
    """404: there is none of this name, or it is another key's."""
    return APIError(404, f"there is no {kind} '{name}'", param=param, code=f"{kind}_not_found")


@contextmanager
def refusals() -> Iterator[None]:
    """Raise errors about bounds as responses."""
    try:
        yield
    except tuple(_REFUSALS) as error:
        status, code = next(_REFUSALS[kind] for kind in type(error).mro() if kind in _REFUSALS)
        headers = {"Retry-After": "60"} if status == 429 else None
        raise APIError(status, str(error), code=code, headers=headers) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise APIError(413, "there is no place for it on the server's disk", code="storage_full") from error


class Viewed(Protocol):
    """Has an id, and is shown as an object."""

    @property
    def id(self) -> str: ...

    def view(self) -> dict[str, Any]: ...


def page(records: Seq[Viewed], after: str | None, limit: int) -> dict[str, Any]:
    """A page of a list: the records that follow the one of the id ``after``."""
    begin = 0
    if after is not None:
        begin = next((number for number, each in enumerate(records, 1) if each.id == after), len(records))
    shown = records[begin : begin + limit]
    return {
        "object": "list",
        "data": [record.view() for record in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": begin + limit < len(records),
    }
