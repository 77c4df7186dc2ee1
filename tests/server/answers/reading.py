"""What the answers of both routes are tested with: a tokenizer, and a stream read back."""

from __future__ import annotations

import json
from typing import Any

from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())


def read(events: bytes) -> list[dict[str, Any]]:
    """The chunks in a piece of a stream, without its end."""
    found = [event.removeprefix("data: ") for event in events.decode().split("\n\n") if event]
    return [json.loads(event) for event in found if event != "[DONE]"]
