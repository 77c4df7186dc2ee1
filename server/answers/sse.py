"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

COMMENT = b": waiting\n\n"
"""What every reader of such a stream leaves out: it shows that the connection is alive."""


def event(data: str, name: str | None = None) -> bytes:
    """One server-sent event with ``data``, which must be on one line."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {data}\n\n".encode()


def typed_event(kind: str, fields: dict[str, Any]) -> bytes:
    """An event whose name is also the ``type`` of its data."""
    return event(json.dumps({"type": kind, **fields}), kind)
