"""What the Hub refuses, said in one line as one of our own exceptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
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

from ..errors import CheckpointError, CheckpointNotFoundError

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
