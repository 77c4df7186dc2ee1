"""Virtual accelerators set by an environment variable: ``BIGMODEL_VIRTUAL=2x1GiB@8GB bigmodel plan ...``"""

from __future__ import annotations

import os
import re

from ...errors import DeviceError
from ..sizes import parse_size

VARIABLE = "BIGMODEL_VIRTUAL"
STRICT = "BIGMODEL_VIRTUAL_STRICT"
_FORM = re.compile(r"(\d+)(?:x([^@]+))?(?:@(.+))?")


def from_environment() -> tuple[int, int | None, int | None] | None:
    """Return the count, capacity of each (bytes) and link bandwidth (bytes per second) that ``BIGMODEL_VIRTUAL`` sets,
    as in ``2``, ``2x1GiB`` or ``2x1GiB@8GB``; None if it is not set.

    Raises:
        DeviceError: The variable has another form.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    match = _FORM.fullmatch(text)
    if match is None:
        raise DeviceError(
            f"{VARIABLE}={text!r} cannot be read; write COUNT, COUNTxCAPACITY or COUNTxCAPACITY@BYTES_PER_S"
        )
    count, capacity, bandwidth = match.groups()
    return int(count), parse_size(capacity) if capacity else None, parse_size(bandwidth) if bandwidth else None


def strict_from_environment() -> bool:
    """Whether ``BIGMODEL_VIRTUAL_STRICT`` asks for strict accelerators: it is set, and not to 0."""
    return os.environ.get(STRICT, "0").strip() not in ("", "0")


def late_from_environment() -> bool:
    """Whether ``BIGMODEL_VIRTUAL_STRICT`` is ``late``: strict accelerators compute after operations are launched."""
    return os.environ.get(STRICT, "").strip() == "late"
