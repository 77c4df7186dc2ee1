"""JSON objects that name no key twice: readers differ in which of the two they take, so none may be taken."""

from __future__ import annotations

from typing import Any


class DuplicateKeyError(Exception):
    """An object names ``key`` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object as a dictionary: an ``object_pairs_hook`` for `json.loads`.

    Raises:
        DuplicateKeyError: a key is there twice.
    """
    items = dict(pairs)
    if len(items) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return items
