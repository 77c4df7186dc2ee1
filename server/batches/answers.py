"""The answers of a batch: one file of those that succeeded, one of those that failed, appended to as they come.

    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "req_...", "body": {...}},
     "error": null}

The id of an answer ends with the number of its request, so that a later run knows what is answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bigmodel.server.batches.file_store import FileStore, PendingFile
from bigmodel.server.batches.lines import CheckedInput
from bigmodel.server.batches.records import Batch
from bigmodel.server.batches.usage import BatchUsage, usage_of

_LINE = re.compile(rb'\{"id": "batch_req_[0-9a-f]{32}([0-9a-f]{8})", ')


@dataclass(frozen=True)
class Answered:
    """What a route has answered: its status, the id of the request, and a body in JSON."""

    status: int
    request_id: str
    body: bytes

    @property
    def succeeded(self) -> bool:
        """Whether it is not an error."""
        return 200 <= self.status < 300


class AnswerFiles:
    """The two files of a batch, begun or gone on with.

    Attributes:
        done: Numbers of the requests that have an answer.
        completed: How many of these succeeded.
        usage: The tokens that these took.
    """

    def __init__(self, files: FileStore, batch: Batch) -> None:
        self._batch = batch
        self._outputs = files.reopen(batch.output_id, batch.owner)
        try:
            self._errors = files.reopen(batch.error_id, batch.owner)
        except BaseException:
            self._outputs.close()
            raise
        self.usage = BatchUsage()
        succeeded = _numbers(self._outputs, self._add_usage)
        self.completed = len(succeeded)
        self.done = succeeded | _numbers(self._errors)

    @property
    def failed(self) -> int:
        """How many requests have failed."""
        return len(self.done) - self.completed

    def add(self, number: int, custom_id: str, answered: Answered) -> None:
        """Append the answer to a request. Raises StoreFullError or OSError where there is no place for it."""
        head = {"status_code": answered.status, "request_id": answered.request_id}
        response = json.dumps(head)[:-1].encode() + b', "body": ' + _on_one_line(answered.body) + b"}"
        file = self._outputs if answered.succeeded else self._errors
        file.write(self._line(number, custom_id, response, b"null"))
        self._note(number, succeeded=answered.succeeded)
        if answered.succeeded:
            self._add_usage(answered.body)

    def add_missing(self, requests: CheckedInput, code: str, message: str) -> None:
        """Append the same error for each request that has no answer."""
        for number in range(len(requests)):
            if number not in self.done:
                self.add_error(number, requests.read(number).custom_id, code, message)

    def add_error(self, number: int, custom_id: str, code: str, message: str) -> None:
        """Append the error of a request that has no answer."""
        error = json.dumps({"code": code, "message": message}).encode()
        self._errors.write(self._line(number, custom_id, b"null", error))
        self._note(number, succeeded=False)

    def publish(self) -> dict[str, str]:
        """Show the files that have lines; returns the fields of the batch that name them."""
        batch = self._batch
        shown: dict[str, str] = {}
        for file, kind in ((self._outputs, "output"), (self._errors, "error")):
            if file.size:
                name = f"{batch.id}_{kind}.jsonl"
                file.publish(name, "batch_output", batch.output_seconds)
                shown[f"{kind}_file_id"] = file.id
            else:
                file.discard()
        return shown

    def close(self) -> None:
        """Leave them for a later run."""
        for file in (self._outputs, self._errors):
            with suppress(OSError):
                file.close()

    def _add_usage(self, answer: bytes) -> None:
        self.usage += usage_of(answer)

    def _note(self, number: int, *, succeeded: bool) -> None:
        self.done.add(number)
        self.completed += succeeded

    def _line(self, number: int, custom_id: str, response: bytes, error: bytes) -> bytes:
        name = f"batch_req_{self._batch.id.removeprefix('batch_')}{number:08x}"
        begin = f'{{"id": "{name}", "custom_id": {json.dumps(custom_id)}, "response": '.encode()
        return begin + response + b', "error": ' + error + b"}\n"


_LINE_ENDS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
"""Characters of texts that some clients take for the end of a line, and how JSON writes them otherwise."""


def _on_one_line(body: bytes) -> bytes:
    for end, escaped in _LINE_ENDS.items():
        body = body.replace(end, escaped)
    return body.replace(b"\n", b" ")  # between values, where one has any


def _numbers(file: PendingFile, seen: Callable[[bytes], None] | None = None) -> set[int]:
    """Numbers of the requests that a file has answers to."""
    found = (_LINE.match(line) for line in file.complete_lines(seen))
    return {int(match[1], 16) for match in found if match}
