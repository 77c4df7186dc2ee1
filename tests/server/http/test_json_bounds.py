"""Bounds of a JSON text before it is parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bigmodel.server.http.json_bounds import CONTAINERS, MEMBERS, NUMBER_BYTES, PART, JSONBoundsError, check_bounds
from tests.examples import alike

MOST = 200_000
LONGEST = 10 * MOST


@alike(
    ("text", "what"),
    [
        (b"[" + b"1," * MOST + b"1]", f"more than {MOST} values"),
        (b"[" + b'{"a":1},' * MEMBERS + b'{"b":1}]', f"more than {MEMBERS} members of objects"),
        (b"[" * CONTAINERS + b"[", f"more than {CONTAINERS} objects and lists"),
        (b"[" + b"[]," * CONTAINERS + b"1]", f"more than {CONTAINERS} objects and lists"),
        (b'{"a": ' + b"9" * (NUMBER_BYTES + 1) + b"}", f"a number in it has more than {NUMBER_BYTES} characters"),
        (b"[" + b" " * (PART - 50) + b"9" * (NUMBER_BYTES + 1) + b"]", f"more than {NUMBER_BYTES} characters"),
        (b'["' + b"a" * (LONGEST + 1) + b'"]', f"more than {LONGEST} bytes in one string"),
        (b'["\\n", "' + b"a" * (LONGEST + 2), f"more than {LONGEST} bytes in one string"),
        (b'{"a": "", "b": -1.' + b"0" * NUMBER_BYTES + b"}", f"more than {NUMBER_BYTES} characters"),
        (b"[" + b'"",' * MOST + b"1]", f"more than {MOST} values"),
        (b"[" + b'""' * (MOST + MEMBERS + 1) + b"]", f"more than {MOST + MEMBERS} strings"),
    ],
    first=9,
)
def test_what_no_request_needs_is_refused(text: bytes, what: str) -> None:
    with pytest.raises(JSONBoundsError, match=what):
        check_bounds(text, MOST, LONGEST)


@pytest.mark.parametrize(
    "value",
    [
        ["a,b:[{" * MOST],
        ['"' * MOST, "\\" * MOST, '\\"' * MOST, "," * MOST],
        {"a": "1" * MOST},
        [1.5] * (MOST - 1),
        {"a": [10**NUMBER_BYTES // 10]},
    ],
)
def test_what_strings_hold_does_not_count(value: Any) -> None:
    check_bounds(json.dumps(value).encode(), MOST, LONGEST)


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'"\\"', b"\\", b'{"a', b"\x00\xff"])
def test_what_is_no_json_is_left_to_the_parser(text: bytes) -> None:
    check_bounds(text, MOST, LONGEST)


def test_values_are_counted_as_the_parser_counts_them() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(1, 5))]
        if kind == 5:
            return {f'{n}",:[': value(depth - 1) for n in range(rng.randrange(1, 5))}
        return [rng.random(), None, 'a"b\\', ",,[{"][kind]

    def leaves(made: Any) -> int:
        if isinstance(made, dict):
            made = list(made.values())
        return sum(map(leaves, made)) if isinstance(made, list) else 1

    for _ in range(300):
        made = value(5)
        text = json.dumps(made).encode()
        check_bounds(text, leaves(made), LONGEST)
        if leaves(made) > 1:
            with pytest.raises(JSONBoundsError):
                check_bounds(text, leaves(made) - 1, LONGEST)
