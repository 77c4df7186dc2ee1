"""Sizes in bytes: parsing and formatting of text such as ``"10GiB"``."""

from __future__ import annotations

import re

from ..errors import SizeError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
LARGEST = 2**63 - 1
"""Largest accepted size in bytes: no machine has more."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(size: int | str) -> int:
    """Return `size` in bytes.

    Args:
        size: An integer number of bytes, or text such as ``"10GiB"`` (2**30), ``"10GB"`` or ``"10G"``
            (10**9), ``"512MiB"``, ``"0"``. Case does not matter; a trailing lower-case ``b`` means bytes.

    Raises:
        SizeError: The text is not a size, or the size is negative or more than `LARGEST`.
    """
    found = _bytes_of(size)
    if found > LARGEST:
        raise SizeError(f"a size is more than {LARGEST} bytes; give at most the memory of a device")
    return found


def _bytes_of(size: int | str) -> int:
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SizeError(f"size {size!r} is a {type(size).__name__}; give an int of bytes or text such as '10GiB'")
    if isinstance(size, int):
        if size < 0:
            raise SizeError(f"size {max(size, -LARGEST)} is negative; give 0 or more bytes")
        return size
    match = _SIZE.fullmatch(size)
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS:
        raise SizeError(
            f"size {size!r:.80} cannot be read; write for example '10GiB', '10GB', '512MiB' or an int of bytes"
        )
    number = match.group(1)
    if "." not in number and len(number) < 20:
        return int(number) * _UNITS[unit]
    return int(min(float(number) * _UNITS[unit], 2.0 * LARGEST))


def format_size(size: int | float) -> str:
    """Return `size` bytes as short text in binary units, such as ``"1.50 GiB"``."""
    sign, amount = ("-", -float(size)) if size < 0 else ("", float(size))
    if amount < 1024:
        return f"{sign}{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{sign}{amount:.2f} {unit}"
    return f"{sign}{amount / 1024:.2f} TiB"
