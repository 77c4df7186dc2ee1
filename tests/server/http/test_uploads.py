"""A form's file goes to where it is kept as it comes; everything else of it is short."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request

from bigmodel.server.http.errors import APIError
from bigmodel.server.http.respond import ClientGoneError
from bigmodel.server.http.uploads import FIELD_BYTES, FIELDS, FILENAME_CHARS, HEADER_BYTES, Form, read_form


class Kept:
    """Keeps what is written, and in how many pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)


def part(name: str, content: bytes, filename: str | None = None, more: bytes = b"") -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--BOUNDARY\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'.encode()
    return head + more + b"\r\n" + content + b"\r\n"


END = b"--BOUNDARY--\r\n"
FORM = "multipart/form-data; boundary=BOUNDARY"


async def read(body: bytes, kind: str = FORM, *, size: int = 1 << 16, leaves: bool = False) -> tuple[Form, Kept]:
    """Read a body that comes in pieces of this size."""

    async def messages() -> AsyncIterator[dict[str, Any]]:
        for begin in range(0, len(body), size):
            yield {"type": "http.request", "body": body[begin : begin + size], "more_body": True}
        yield {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False}

    stream = messages()
    scope = {"type": "http", "headers": [(b"content-type", kind.encode())]}
    kept = Kept()
    return await read_form(Request(scope, stream.__anext__), "file", kept), kept


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_a_file_and_the_fields_beside_it(size: int) -> None:
    content = b"a\r\n--BOUND\r\n\r\n--\xff" * 9
    body = part("purpose", b"batch") + part("file", content, "r\u00e9 x.jsonl") + part("after", "é".encode()) + END
    form, kept = await read(body, size=size)
    assert form == Form({"purpose": "batch", "after": "é"}, "r\u00e9 x.jsonl")
    assert kept.content == content


@pytest.mark.anyio
async def test_a_long_file_is_written_in_pieces() -> None:
    content = b"x" * 1_000_000
    _, kept = await read(part("file", content, "x") + END)
    assert kept.content == content
    assert max(map(len, kept.pieces)) <= 1 << 16


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b"{}", "application/json", "file"),
        (b"{}", "", "file"),
        (b"{}", "multipart/form-data", "file"),
        (b"not a form", FORM, "file"),
        (END, FORM + "x" * 300, "file"),
        (part("file", b"x", "x"), FORM, "file"),
        (part("file", b"x") + END, FORM, "file"),
        (part("other", b"x", "x") + END, FORM, "other"),
        (part("", b"x") + END, FORM, "file"),
        (part("a", b"x") + part("a", b"x") + END, FORM, "a"),
        (part("file", b"x", "x") + part("file", b"x", "x") + END, FORM, "file"),
        (part("a", b"x" * (FIELD_BYTES + 1)) + END, FORM, "a"),
        (part("a", b"x", more=b"X: " + b"x" * HEADER_BYTES + b"\r\n") + END, FORM, "file"),
        (b"".join(part(f"f{number}", b"") for number in range(FIELDS + 1)) + END, FORM, f"f{FIELDS}"),
    ],
)
@pytest.mark.parametrize("size", [11, 1 << 16])
async def test_what_is_no_form_or_too_much_of_one_is_refused(body: bytes, kind: str, param: str, size: int) -> None:
    with pytest.raises(APIError) as refused:
        await read(body, kind, size=size)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.anyio
async def test_a_long_name_of_a_file_is_shortened_and_none_is_a_path() -> None:
    form, _ = await read(part("file", b"", "../../" + "x" * 1000) + END)
    assert form.filename is not None
    assert len(form.filename) == FILENAME_CHARS  # it is shown, and names nothing


@pytest.mark.anyio
async def test_a_client_that_leaves_is_not_an_error_of_its_form() -> None:
    with pytest.raises(ClientGoneError):
        await read(part("file", b"x", "x"), leaves=True)
