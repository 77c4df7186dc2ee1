"""Dotted names of modules and tensors: what lies in what."""

from __future__ import annotations

from collections.abc import Container, Iterator


def itself_and_around(name: str) -> Iterator[str]:
    """Yield `name` and the modules that it lies in, the innermost first; the whole model, `""`, comes last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def owner_of(name: str, keys: Container[str]) -> str | None:
    """Return the longest of `keys` that is `name` or a module that it lies in; None if there is none."""
    return next((around for around in itself_and_around(name) if around in keys), None)
