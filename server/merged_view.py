"""What /plan shows of several servers, as that of one: bytes and counts added up."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

# How each engine is set up, rather than what it does or has room for.
_SETTINGS = ("state", "runner", "row_multiple", "host_linear", "max_batch_tokens")


def merge_views(views: Seq[dict[str, Any]]) -> dict[str, Any]:
    """``devices``, ``streamed`` and ``engine`` of all ``views`` (see :func:`bigmodel.server.view.view`) together.

    Bytes and counts add up, by device name; a sum of which a part is unknown is None. Of an engine's settings there
    is the one that all engines have, else None, and the shortest ``max_length``. Engines still to come count nothing.
    """
    engines = [view["engine"] for view in views if view["engine"] is not None]
    return {
        "devices": _by_device([entry for view in views for entry in view["devices"]]),
        "streamed": _by_device([entry for view in views for entry in view["streamed"]]),
        "engine": _engine(engines) if engines else None,
    }


def _by_device(entries: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    together: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        together.setdefault(entry["device"], []).append(entry)
    return [_combined(same, {"device": _alike}) for same in together.values()]


def _engine(engines: Seq[dict[str, Any]]) -> dict[str, Any]:
    return _combined(engines, {"max_length": min, **dict.fromkeys(_SETTINGS, _alike)})


def _combined(entries: Seq[dict[str, Any]], special: dict[str, Callable[[Seq[Any]], Any]]) -> dict[str, Any]:
    """One entry of all: each field the sum of theirs, but for the ``special`` ones."""
    return {key: special.get(key, _sum)([entry[key] for entry in entries]) for key in entries[0]}


def _sum(values: Seq[Any]) -> Any:
    if any(value is None for value in values):
        return None
    return _combined(values, {}) if isinstance(values[0], dict) else sum(values)


def _alike(values: Seq[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None
