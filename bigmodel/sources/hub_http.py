"""What the Hub refuses, said in one line as one of our own exceptions.

A part of a file on an HTTP server.
"""

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
"""The base of the HTTP library's own errors: httpx in one release of huggingface_hub, httpx2 in another."""


class UnreachableError(CheckpointNotFoundError):
    """The server could not be asked at all."""


@contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises about `repo_id` into `CheckpointNotFoundError` or `CheckpointError`."""
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
    """The server's address, without a slash at its end."""
    # Read at each call: huggingface_hub reads the variable only once, when it is imported.
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


TIMEOUT_SECONDS = 10.0
"""How long a server may stay silent."""

_CHUNK = 64 * 1024
_BUSY = (408, 429, 500, 502, 503, 504)
_hub: Any = utils  # its names are exported lazily, which a type checker does not see


def read_range(url: str, token: str | bool | None, start: int, count: int) -> tuple[bytes, int]:
    """Up to `count` bytes of the file at `url` from `start`, and the size of the whole file in bytes.

    No more than that is received, whether or not the server knows ranges. A busy server is asked again.

    Args:
        url: the file's address on the Hub.
        token: as for huggingface_hub.
        start: first byte.
        count: how many bytes at most.

    Raises:
        CheckpointFormatError: the server does not say how long the file is.
        HfHubHTTPError: the server refuses.
    """
    headers = _hub.build_hf_headers(token=token)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    options = {"timeout": TIMEOUT_SECONDS, "max_retries": 3, "retry_on_status_codes": _BUSY, "follow_redirects": True}
    with _hub.http_stream_backoff("GET", url, headers=headers, **options) as response:
        _hub.hf_raise_for_status(response)
        partial = response.status_code == 206
        # A server that ignores ranges sends the file from its beginning: stop listening after what is wanted.
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
