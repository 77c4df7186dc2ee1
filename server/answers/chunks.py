"""The chunks of a streamed answer: what all of them have in common is written once, not once a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bigmodel.server.engine import Done
from bigmodel.server.sse import event
from bigmodel.server.state import usage


class Chunks:
    """Writes the chunks of one answer, each with ``head``; with ``wants_usage`` a last one has the usage."""

    def __init__(self, head: Mapping[str, Any], wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._head = json.dumps(head)[:-1]
        self._before = f'{self._head}, "choices": [{{"index": '
        self._after = '}], "usage": null}' if wants_usage else "}]}"

    def of_choice(self, index: int, fields: str) -> bytes:
        """The chunk of one choice; ``fields`` is the JSON of what it has beside its index."""
        return event(f"{self._before}{index}, {fields}{self._after}")

    def closing(self, done: Done) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._wants_usage:
            return b""
        numbers = json.dumps(usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens))
        return event(f'{self._head}, "choices": [], "usage": {numbers}}}')
