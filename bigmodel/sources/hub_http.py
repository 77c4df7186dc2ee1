"""HTTP access to the Hub: range requests, and translation of its errors into this package's exceptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, utils
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base class of the HTTP library's errors: httpx or httpx2, depending on the release of huggingface_hub."""


class UnreachableError(CheckpointNotFoundError):
    """The server cannot be reached."""


@contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Translate errors of huggingface_hub about `repo_id` into `CheckpointNotFoundError` or `CheckpointError`."""
    try:
        yield
    except HFValidationError as error:
        raise CheckpointNotFoundError(
            f"{repo_id!r} is neither an existing path nor the name of a repository ({error})"
        ) from error
    except GatedRepoError as error:
        raise CheckpointNotFoundError(
            f"{repo_id}: access must be granted first: ask for it at {hub_endpoint()}/{repo_id}, then log in "
            "with `hf auth login` or pass token="
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{repo_id}: is neither a local path nor a repository at {hub_endpoint()}; "
            "check the name, and log in with `hf auth login` or pass token= if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointNotFoundError(f"{repo_id}: has no branch, tag or commit {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UnreachableError(f"{hub_endpoint()} cannot be reached ({error})") from error
    except EntryNotFoundError as error:
        raise CheckpointNotFoundError(f"{repo_id}: lacks a file that its index names ({error})") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{repo_id}: {hub_endpoint()} refused the request ({error})") from error
    except _HTTP_ERROR as error:
        raise UnreachableError(f"{hub_endpoint()} cannot be reached ({error or type(error).__name__})") from error


def hub_endpoint() -> str:
    """Return the address of the server, without a trailing slash."""
    # Read at each call: huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


TIMEOUT_SECONDS = 10.0
"""Timeout of a request without any response."""

_CHUNK = 64 * 1024
_BUSY = (408, 429, 500, 502, 503, 504)
_hub: Any = utils  # type checkers do not see its lazily exported names


def read_range(url: str, token: str | bool | None, start: int, count: int) -> tuple[bytes, int]:
    """Return up to `count` bytes of the file at `url` from `start`, and the size of the whole file in bytes.

    Reception stops after these bytes also if the server ignores ranges. Requests to a busy server are retried.

    Args:
        url: the file's address on the Hub.
        token: as for huggingface_hub.
        start: first byte.
        count: maximum number of bytes.

    Raises:
        CheckpointFormatError: the server does not report the length of the file.
        HfHubHTTPError: the server refuses the request.
    """
    headers = _hub.build_hf_headers(token=token)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    options = {"timeout": TIMEOUT_SECONDS, "max_retries": 3, "retry_on_status_codes": _BUSY, "follow_redirects": True}
    with _hub.http_stream_backoff("GET", url, headers=headers, **options) as response:
        _hub.hf_raise_for_status(response)
        partial = response.status_code == 206
        # A server that ignores ranges sends the file from its beginning.
        skip = 0 if partial else start
        content = bytearray()
        for chunk in response.iter_bytes(_CHUNK):
            content += chunk
            if len(content) >= skip + count:
                break
        size = response.headers.get("Content-Range" if partial else "Content-Length", "").rpartition("/")[2]
    if not size.isdigit():
        raise CheckpointFormatError(f"{url}: the server does not say how long the file is")
    return bytes(content[skip : skip + count]), int(size)
