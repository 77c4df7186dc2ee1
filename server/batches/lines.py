"""The input of a batch: one request a line, checked as a whole before any is answered.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [...]}}

A line is read again when its turn comes: only its place in the file is kept.
"""

from __future__ import annotations

import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from bigmodel.errors import ServeError
from bigmodel.server.batches.limits import BatchLimits
from bigmodel.server.batches.records import InputError

_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class RequestLine:
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


@dataclass
class CheckedInput:
    """The requests of an input file, or what is wrong with it."""

    path: Path
    errors: list[InputError] = field(default_factory=list)
    model: str | None = None
    """The model that its first request names."""
    _offsets: array[int] = field(default_factory=lambda: array("Q"))
    _sizes: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self._offsets)

    def size(self, number: int) -> int:
        """Bytes of a line."""
        return self._sizes[number]

    def read(self, number: int) -> RequestLine:
        """Return a request; the first has the number 0."""
        with self.path.open("rb") as file:
            line = from_json(os.pread(file.fileno(), self._sizes[number], self._offsets[number]))
        return RequestLine(line["custom_id"], line["body"])

    def add(self, offset: int, line: bytes) -> None:
        """Keep the place of a line."""
        self._offsets.append(offset)
        self._sizes.append(len(line))


class CheckStoppedError(ServeError):
    """The check was ended before its time."""


def check_input(
    path: Path,
    endpoint: str,
    limits: BatchLimits,
    *,
    check_bounds: Callable[[bytes], None] = lambda line: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CheckedInput:
    """Check the input of a batch.

    Args:
        path: The file.
        endpoint: What all of its requests ask.
        limits: Bounds of its lines.
        check_bounds: Raises ValueError for a line that would take too long to parse.
        stopped: Whether to end the check.

    Raises:
        CheckStoppedError: It was ended.
        OSError: The file cannot be read.
    """
    found = CheckedInput(path)
    seen: dict[str, int] = {}

    def wrong(code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        found.errors.append(InputError(code=code, message=message, param=param, line=line))

    with path.open("rb") as file:
        for number, offset, text in _lines(file, limits.line_bytes):
            if stopped():
                raise CheckStoppedError("the batch was ended")
            if len(found.errors) >= limits.errors:
                break
            if not text:
                if number > 2 * limits.lines:  # whatever follows: a look at each of 200 million takes minutes
                    wrong("too_many_lines", f"The file has more than {2 * limits.lines} lines.", line=number)
                    break
                continue
            if len(found) == limits.lines:
                wrong("too_many_requests", f"The file has more than {limits.lines} requests.", line=number)
                break
            try:
                line = _parsed(text, limits.line_bytes, check_bounds)
                custom_id = _custom_id(line, endpoint, limits)
                if custom_id in seen:
                    why = f"The custom_id '{custom_id}' is that of line {seen[custom_id]}, too: each needs its own."
                    raise _LineError("duplicate_custom_id", why, "custom_id")
            except _LineError as error:
                wrong(error.code, str(error), error.param, number)
                continue
            seen[custom_id] = number
            found.add(offset, text)
            if len(found) == 1:
                model = line["body"].get("model")
                found.model = model if isinstance(model, str) else None
    if not len(found) and not found.errors:
        wrong("empty_file", "The file has no requests.")
    return found


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of each line, empty if it is blank; of one that is too long, a part that is too long."""
    number = offset = 0
    while text := file.readline(most_bytes + 2):
        number += 1
        begin = offset
        offset += len(text)
        line = text.rstrip(b"\r\n")
        if number == 1 and line.startswith(BOM_UTF8):
            begin, line = len(BOM_UTF8), line[len(BOM_UTF8) :]
        yield number, begin, line if line.strip() else b""
        while text and not text.endswith(b"\n"):  # the rest of a long one
            text = file.readline(1 << 20)
            offset += len(text)


class _LineError(ServeError):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def _parsed(text: bytes, most_bytes: int, check_bounds: Callable[[bytes], None]) -> dict[str, Any]:
    if len(text) > most_bytes:
        raise _LineError("line_too_long", f"This line has more than {most_bytes} bytes.")
    try:
        check_bounds(text)
        line = from_json(text)
    except ValueError as error:
        raise _LineError("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from None
    if not isinstance(line, dict):
        raise _LineError("invalid_json_line", "This line is not a JSON object.")
    return line


def _custom_id(line: dict[str, Any], endpoint: str, limits: BatchLimits) -> str:
    """The name of a request, whose other fields are right."""
    for name in _FIELDS:
        if line.get(name) is None:
            raise _LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    unknown = next((name for name in line if name not in _FIELDS), None)
    if unknown is not None:
        raise _LineError("unknown_parameter", f"Unknown parameter: '{unknown[:64]}'.", unknown[:64])
    custom_id, method, url, body = (line[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= limits.custom_id_chars:
        why = f"'custom_id' must be a string of 1 to {limits.custom_id_chars} characters."
        raise _LineError("invalid_custom_id", why, "custom_id")
    if method != "POST":
        raise _LineError("invalid_method", "'method' must be 'POST'.", "method")
    if url != endpoint:
        raise _LineError("invalid_url", f"'url' must be that of the batch: '{endpoint}'.", "url")
    if not isinstance(body, dict):
        raise _LineError("invalid_body", "'body' must be an object.", "body")
    return custom_id
