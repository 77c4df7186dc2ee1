"""Bounds of the files and batches that a server keeps, and the errors of what passes them."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.errors import ServeError

STORE_BYTES = 10 << 30


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of files and batches.

    Attributes:
        file_bytes: Bytes of a file that is uploaded.
        total_bytes: Bytes of all files, answers that are being written included.
        files: Files, those that are being written included.
        share: Of both, what the files of one key may have: others have the rest.
        lines: Requests of a batch.
        line_bytes: Bytes of one of them.
        custom_id_chars: Characters of its name.
        batches: Batches that are known; of those that have ended, the oldest are forgotten.
        unfinished: Batches that have not ended.
        errors: Errors of a batch's input that are listed.
    """

    file_bytes: int = 200 << 20
    total_bytes: int = STORE_BYTES
    files: int = 2_000
    share: float = 1.0
    lines: int = 50_000
    line_bytes: int = 16 << 20
    custom_id_chars: int = 512
    batches: int = 1_000
    unfinished: int = 64
    errors: int = 50


class FileTooLongError(ServeError):
    """A file has more bytes than one may have."""


class StoreFullError(ServeError):
    """There is no place for another file, or for more bytes."""


class FileInUseError(ServeError):
    """A batch that has not ended needs the file."""


class TooManyBatchesError(ServeError):
    """There are as many unfinished batches as there may be."""


class BatchEndedError(ServeError):
    """A batch has ended, or is about to: it cannot be cancelled."""
