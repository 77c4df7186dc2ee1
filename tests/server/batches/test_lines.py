"""The input of a batch is right as a whole, or its errors say which lines are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigmodel.server.batches.limits import BatchLimits
from bigmodel.server.batches.lines import CheckedInput, CheckStoppedError, check_input
from tests.server.batches.making import ENDPOINT, line, lines


def checked(folder: Path, content: bytes, limits: dict[str, int] | None = None, **options: Any) -> CheckedInput:
    path = folder / "input"
    path.write_bytes(content)
    return check_input(path, ENDPOINT, BatchLimits(**(limits or {})), **options)


def test_requests_are_read_again_by_number(tmp_path: Path) -> None:
    requests = [line("a"), line("b", body={"model": "x", "prompt": "é\u2028"}), line("c")]
    content = b"\xef\xbb\xbf" + requests[0] + b"\r\n\n  \n" + requests[1] + b"\n" + requests[2]  # no end of line
    found = checked(tmp_path, content)
    assert (found.errors, len(found), found.model) == ([], 3, "tiny")
    assert [found.read(number).custom_id for number in (2, 0, 1)] == ["c", "a", "b"]
    assert found.read(1).body == {"model": "x", "prompt": "é\u2028"}
    assert found.size(1) == len(requests[1])


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"[" * 10_000, "invalid_json_line", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(method=None), "missing_required_parameter", "method"),
        (line(url=None), "missing_required_parameter", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(body=[1]), "invalid_body", "body"),
        (line(other=1), "unknown_parameter", "other"),
        (line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, wrong: bytes, code: str, param: str | None) -> None:
    found = checked(tmp_path, lines(line("first"), b"", wrong, line("last")))
    assert [(each.code, each.param, each.line) for each in found.errors] == [(code, param, 3)]
    assert found.errors[0].message


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_requests_is_an_error_of_no_line(tmp_path: Path, content: bytes) -> None:
    assert [(each.code, each.line) for each in checked(tmp_path, content).errors] == [("empty_file", None)]


def test_there_are_so_many_requests_at_most(tmp_path: Path) -> None:
    content = lines(*(line(f"{number}") for number in range(3)))
    assert checked(tmp_path, content, {"lines": 3}).errors == []
    found = checked(tmp_path, content, {"lines": 2})
    assert [(each.code, each.line) for each in found.errors] == [("too_many_requests", 3)]


def test_there_may_be_a_blank_line_for_each_request(tmp_path: Path) -> None:
    content = lines(line("a"), b"", b"", line("b"))
    assert checked(tmp_path, content, {"lines": 2}).errors == []
    found = checked(tmp_path, content + b"\n" * 100, {"lines": 2})
    assert [(each.code, each.line) for each in found.errors] == [("too_many_lines", 5)]


def test_a_line_has_so_many_bytes_at_most_and_later_ones_keep_their_numbers(tmp_path: Path) -> None:
    long = line("long", body={"prompt": "x" * 3_000_000})
    content = lines(line("a"), long, b"{")
    found = checked(tmp_path, content, {"line_bytes": len(long) - 1})
    assert [(each.code, each.line) for each in found.errors] == [("line_too_long", 2), ("invalid_json_line", 3)]
    assert [each.line for each in checked(tmp_path, content, {"line_bytes": len(long)}).errors] == [3]


def test_so_many_errors_are_listed_at_most(tmp_path: Path) -> None:
    found = checked(tmp_path, b"{\n" * 100, {"errors": 5})
    assert [each.line for each in found.errors] == [1, 2, 3, 4, 5]


def test_a_line_that_would_take_too_long_to_parse_is_wrong(tmp_path: Path) -> None:
    def bounded(text: bytes) -> None:
        if b"many" in text:
            raise ValueError("it has many values")

    found = checked(tmp_path, lines(line("few"), line("many")), check_bounds=bounded)
    assert [(each.line, "many values" in each.message) for each in found.errors] == [(2, True)]


@pytest.mark.parametrize("content", [line(), b"\n"])
def test_the_check_can_be_ended(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckStoppedError):
        checked(tmp_path, content, stopped=lambda: True)
