"""What an answer may be, as a tree that is sent to the process that compiles grammars: texts, JSON schemas, free text.

The nodes are plain objects, so that a tree is JSON: its text is the key of what was compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

Expression: TypeAlias = dict[str, Any]
"""A node: one of those that the functions here make."""


def literal(text: str) -> Expression:
    """A text, as it is."""
    return {"literal": text}


def json_text(schema: dict[str, Any]) -> Expression:
    """The JSON text of a value that fits `schema`."""
    return {"schema": schema}


def space() -> Expression:
    """White space, a few characters of it at most."""
    return {"space": True}


def free_text(*excluded: str) -> Expression:
    """Any text that has none of `excluded` in it. These begin with one character, which is in none of them again."""
    return {"free": sorted(excluded)}


def characters(least: int, most: int | None, excluded: str) -> Expression:
    """`least` to `most` characters other than ``excluded``; any number from `least` on with None."""
    return {"characters": [least, most, excluded]}


def sequence(*parts: Expression) -> Expression:
    """One after another."""
    return {"sequence": list(parts)}


def choice(options: Sequence[Expression]) -> Expression:
    """One of several; there is at least one."""
    return options[0] if len(options) == 1 else {"choice": list(options)}


def optional(part: Expression) -> Expression:
    """A part, or nothing."""
    return {"optional": part}


def repeated(part: Expression, between: Expression) -> Expression:
    """A part once or more, with something ``between`` two of them."""
    return {"repeated": part, "between": between}


def written_size(expression: Expression) -> tuple[int, int]:
    """Return how many values the JSON text of a tree has, and how deep it nests.

    A node that is shared is written wherever it is, and looked at once.
    """
    found: dict[int, tuple[int, int]] = {}
    pending: list[Any] = [expression]
    while pending:
        node = pending[-1]
        members = [each for each in _members(node) if isinstance(each, dict | list)]
        if missing := [each for each in members if id(each) not in found]:
            pending += missing
            continue
        pending.pop()
        sizes = [found[id(each)] for each in members]
        values = 1 + len(node) - len(members) + sum(size for size, _ in sizes)
        found[id(node)] = values, 1 + max((depth for _, depth in sizes), default=0)
    return found[id(expression)]


def _members(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def schemas_in(expression: Expression) -> Iterator[dict[str, Any]]:
    """The schemas in a tree."""
    pending: list[Any] = [expression]
    while pending:
        node = pending.pop()
        if "schema" in node:
            yield node["schema"]
        for name in ("sequence", "choice"):
            pending += node.get(name, ())
        pending += (node[name] for name in ("optional", "repeated", "between") if name in node)
