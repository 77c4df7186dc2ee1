"""Forms with one file: its bytes go to a file on disk as they come, other fields are short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import anyio.to_thread
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.respond import ClientGoneError

FIELDS = 8
"""Fields of a form."""

FIELD_BYTES = 1024
"""Bytes of a field, and of its name."""

HEADER_BYTES = 4096
"""Bytes of the headers of a part."""

FILENAME_CHARS = 255


class Target(Protocol):
    """Takes the bytes of a file."""

    def write(self, data: bytes, /) -> None: ...


@dataclass
class Form:
    """The fields of a form, and the name of its file; None where it had none."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_form(http: Request, file: str, target: Target) -> Form:
    """Read a form, and write its file to ``target``, in threads.

    Args:
        http: The request.
        file: The field that is the file.
        target: Takes its bytes; what it raises is raised.

    Raises:
        APIError: 400 for what is no form, or has more or larger parts than it may have.
        ClientGoneError: The client left meanwhile.
    """
    kind, options = parse_options_header(http.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise bad_value(file, "send a form: 'Content-Type: multipart/form-data' with a boundary")
    try:
        parts = _Parts(boundary, file, target)
        async for chunk in http.stream():
            # Parsed there, too: of some bytes the parser looks at each.
            await anyio.to_thread.run_sync(parts.feed, chunk)
    except FormParserError as error:
        raise bad_value(file, f"the form is malformed: {error}") from error
    except ClientDisconnect:
        raise ClientGoneError from None
    if not parts.ended:
        raise bad_value(file, "the form ends before its last boundary")
    return parts.form


class _Parts:
    """Takes the parts of a form as the parser finds them."""

    def __init__(self, boundary: bytes, file: str, target: Target) -> None:
        self.form = Form()
        self.ended = False
        self._file = file
        self._target = target
        self._headers: list[tuple[str, str]] = []
        self._header = [b"", b""]
        self._name = ""
        self._value: bytearray | None = None  # None within the file
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_taker(0),
                "on_header_value": self._header_taker(1),
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._all,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Take bytes of the body."""
        if chunk and not self.ended:  # what follows the last boundary means nothing
            self._parser.write(chunk)

    def _begin(self) -> None:
        self._headers, self._header = [], [b"", b""]

    def _header_taker(self, which: int) -> Callable[[bytes, int, int], None]:
        def take(data: bytes, start: int, end: int) -> None:
            self._header[which] += data[start:end]
            held = sum(len(name) + len(value) for name, value in self._headers)
            if held + len(self._header[0]) + len(self._header[1]) > HEADER_BYTES:
                raise bad_value(self._file, f"a part of the form has more than {HEADER_BYTES} bytes of headers")

        return take

    def _header_end(self) -> None:
        name, value = (each.decode(errors="replace") for each in self._header)
        self._headers.append((name.lower(), value))
        self._header = [b"", b""]

    def _headers_end(self) -> None:
        # The parser reads it as Latin-1, and clients send UTF-8.
        given = next((value for name, value in self._headers if name == "content-disposition"), "")
        _, options = parse_options_header(given.encode().decode("latin-1"))
        name = options.get(b"name", b"").decode(errors="replace")
        if not name or len(name) > FIELD_BYTES:
            raise bad_value(self._file, "a part of the form has no name, or a very long one")
        known = name in self.form.fields or (name == self._file and self.form.filename is not None)
        if known or len(self.form.fields) >= FIELDS:
            raise bad_value(name, "it is given twice, or the form has too many fields")
        if (b"filename" in options) != (name == self._file):
            raise bad_value(name, f"'{self._file}' is the one field that is a file")
        self._name, self._value = name, bytearray()
        if name == self._file:
            self._value = None
            self.form.filename = options[b"filename"].decode(errors="replace")[:FILENAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._target.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES:
            raise bad_value(self._name, f"it has more than {FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._value is not None:
            self.form.fields[self._name] = self._value.decode(errors="replace")

    def _all(self) -> None:
        self.ended = True


def unknown_field(name: str) -> APIError:
    """400: a field that there is not."""
    return bad_value(name, f"'{name}' is not supported by this server", code="unsupported_parameter")
