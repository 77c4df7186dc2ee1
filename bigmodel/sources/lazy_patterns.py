"""Regular expressions of transformers' rules for checkpoints, compiled when they are first used.

For the rules of one model transformers makes those of all its models, and compiles all their regular expressions, which
takes a twentieth of a second. A plan needs a few of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()


class LazyPattern:
    """Stands for a compiled regular expression, and compiles it when it is used.

    Args:
        pattern: the regular expression.
        flags: those of `re.compile`.
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._arguments = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(re.compile(*self._arguments), name)  # which remembers the last ones

    def __deepcopy__(self, memo: object) -> LazyPattern:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return re.compile, self._arguments


class _LazyRe:
    """The module `re` with a `compile` that does so later."""

    compile = LazyPattern

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)


@contextmanager
def compiled_later() -> Iterator[None]:
    """Have transformers' rules for checkpoints that are made within the context compile their patterns on first use."""
    from transformers import core_model_loading as rules

    with _lock:
        own = vars(rules).get("re")
        if own is not re:  # another version does without
            yield
            return
        vars(rules)["re"] = _LazyRe()
        try:
            yield
        finally:
            vars(rules)["re"] = own
