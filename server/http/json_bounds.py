"""Bounds of a JSON text, checked before it is parsed: millions of values take seconds, and no other thread runs.

The text is looked through string by string, so that other threads go on meanwhile.
"""

from __future__ import annotations

from typing import Any

from bigmodel.errors import ServeError

MEMBERS = 16_384
"""Most members of all objects together."""

ITEMS, ITEM_BYTES = 2048, 600
"""Most objects in one list of a body, such as its messages; a larger body may have one for every `ITEM_BYTES` of it.
Each takes a kilobyte in its objects, however short it is."""

CONTAINERS = 32_768
"""Most objects and lists."""

VALUES = 32_768
"""Most values, beside one for each token of the context."""

NUMBER_BYTES = 100
"""Longest number."""

PART = 64 << 10
"""Bytes that are looked through for numbers at once."""

_OF_NUMBERS = bytes(ord("0" if chr(code) in "-+.0123456789eE" else " ") for code in range(256))
_LONG_NUMBER = b"0" * (NUMBER_BYTES + 1)


class JSONBoundsError(ServeError, ValueError):
    """A JSON text has more parts than any request needs."""


def check_bounds(text: bytes, values: int, string_bytes: int) -> None:
    """Check that a JSON text has at most `values` values, and that none of its other bounds is passed.

    A string of `string_bytes` or fewer bytes passes; escaped quotation marks and backslashes are not counted.

    Texts that are not JSON may pass: parsing finds that out.

    Raises:
        JSONBoundsError: which bound is passed.
    """
    # Without escapes, every quotation mark begins or ends a string.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    commas = members = containers = strings = 0
    at = 0
    while at < len(plain):
        begin = plain.find(b'"', at)
        end = len(plain) if begin < 0 else begin
        commas += plain.count(b",", at, end)
        members += plain.count(b":", at, end)
        containers += plain.count(b"[", at, end) + plain.count(b"{", at, end)
        _check(commas + 1, values, "values")
        _check(members, MEMBERS, "members of objects")
        _check(containers, CONTAINERS, "objects and lists")
        if end - at > NUMBER_BYTES and _has_long_number(plain, at, end):
            raise JSONBoundsError(f"a number in it has more than {NUMBER_BYTES} characters")
        if begin < 0:
            return
        strings += 1  # each is a value or the name of a member, unless the text is no JSON
        _check(strings, values + MEMBERS, "strings")
        closing = plain.find(b'"', begin + 1)
        at = len(plain) if closing < 0 else closing + 1
        _check(at - begin - 2, string_bytes, "bytes in one string")


def check_items(body: Any, size: int) -> None:
    """Check that no list that is a field of a body of `size` bytes has more objects than it may.

    Raises:
        JSONBoundsError: which list has more.
    """
    most = max(ITEMS, size // ITEM_BYTES)
    for name, given in body.items() if isinstance(body, dict) else ():
        if isinstance(given, list) and len(given) > most and any(isinstance(each, dict) for each in given):
            bound = f"{ITEMS}, or one for every {ITEM_BYTES} bytes, are accepted"
            raise JSONBoundsError(f"it has more than {most} items in '{name[:64]}': {bound}")


def _has_long_number(text: bytes, begin: int, end: int) -> bool:
    """Whether a number of more than `NUMBER_BYTES` is between two places.

    Each byte is looked at once: a regular expression begins anew at each digit, and holds up all threads for a second.
    """
    parts = (text[at : min(end, at + PART + NUMBER_BYTES)] for at in range(begin, end, PART))
    return any(_LONG_NUMBER in part.translate(_OF_NUMBERS) for part in parts)


def _check(found: int, most: int, what: str) -> None:
    if found > most:
        raise JSONBoundsError(f"it has more than {most} {what}")
