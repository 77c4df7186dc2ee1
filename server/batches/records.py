"""What is kept of a file and of a batch, and how clients see it: OpenAI's objects."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from bigmodel.server.batches.usage import BatchUsage

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
"""States of a batch that are its last."""

WINDOW_SECONDS = 24 * 3600
"""Time of a batch from its creation to its expiry."""


def new_id(prefix: str) -> str:
    """A new name: in the order of names, what is older comes first."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


class Record(BaseModel):
    """A record that is kept as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    owner: str
    """Name of the API key that made it; "" where no keys are needed."""
    created_at: int
    expires_at: int | None = None


class StoredFile(Record):
    """A file."""

    bytes: int
    filename: str
    purpose: Literal["batch", "batch_output"]

    @property
    def expired(self) -> bool:
        """Whether its time has passed."""
        return self.expires_at is not None and now() >= self.expires_at

    def view(self) -> dict[str, Any]:
        """The object that clients see."""
        shown = self.model_dump(exclude={"owner"})
        return {**shown, "object": "file", "status": "processed", "status_details": None}


class InputError(BaseModel):
    """An error of a batch's input; without a number of a line where it is about all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Batch(Record):
    """A batch. ``output_id`` and ``error_id`` are the files of its answers, which are shown at its end."""

    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """Seconds after which the files of its answers expire."""
    output_id: str
    error_id: str
    status: Status = "validating"
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage = BatchUsage()
    errors: tuple[InputError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @classmethod
    def new(
        cls,
        owner: str,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None = None,
        output_seconds: int | None = None,
    ) -> Batch:
        """A batch that was made now."""
        return cls(
            id=new_id("batch_"),
            owner=owner,
            created_at=now(),
            expires_at=now() + WINDOW_SECONDS,
            endpoint=endpoint,
            input_file_id=input_file_id,
            metadata=metadata,
            output_seconds=output_seconds,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED

    def changed(self, status: Status | None = None, /, **fields: Any) -> Batch:
        """The same batch with other fields, and the time of its new state where that is given."""
        if status is not None and status != self.status:
            fields |= {"status": status, f"{status}_at": now()}
        return self.model_copy(update=fields)

    def view(self) -> dict[str, Any]:
        """The object that clients see."""
        inside = {"owner", "output_seconds", "output_id", "error_id", "total", "completed", "failed", "errors", "usage"}
        errors = [error.model_dump() for error in self.errors]
        return {
            **self.model_dump(exclude=inside),
            "object": "batch",
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.view(),
        }
