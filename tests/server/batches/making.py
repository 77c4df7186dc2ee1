"""Inputs of batches, and stores to keep them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bigmodel.server.batches.batch_store import BatchStore
from bigmodel.server.batches.file_store import FileStore
from bigmodel.server.batches.limits import BatchLimits
from bigmodel.server.batches.records import Batch, StoredFile

ENDPOINT = "/v1/completions"


def line(custom_id: object = "a", **changes: Any) -> bytes:
    """A request of a batch; fields that are changed to None are left out."""
    fields = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "tiny"}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def lines(*requests: bytes) -> bytes:
    """A file of requests."""
    return b"".join(request + b"\n" for request in requests)


def file_store(folder: Path, **limits: int) -> FileStore:
    """A store of files in a folder."""
    folder.mkdir(exist_ok=True)
    return FileStore(folder, BatchLimits(**limits))


def batch_store(folder: Path, **limits: int) -> BatchStore:
    """A store of batches in a folder."""
    folder.mkdir(exist_ok=True)
    return BatchStore(folder, BatchLimits(**limits))


def kept(files: FileStore, content: bytes, owner: str = "") -> StoredFile:
    """A file with this content."""
    pending = files.begin(owner)
    pending.write(content)
    return pending.publish("input.jsonl", "batch")


def batch(owner: str = "", input_file_id: str = "file-1", **fields: Any) -> Batch:
    """A new batch."""
    return Batch.new(owner, ENDPOINT, input_file_id).model_copy(update=fields)


def answers(content: bytes) -> dict[str, dict[str, Any]]:
    """The answers in a file, by the names of their requests."""
    found = [json.loads(each) for each in content.decode().splitlines()]
    assert len({each["id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}
