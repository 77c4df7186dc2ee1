"""Caches of a model over nodes: what the first stage tells the others of its own, and what these have in its place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import ServeError

_REORDERING = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
"""Methods of a cache that other stages would have to follow."""


def _refuse_reordering(*_: Any, **__: Any) -> None:
    raise ServeError("a model over several nodes does not reorder its cache: generate without beams")


class NumberedCaches:
    """Caches of transformers, by a number that the first stage gives each, and says when one is gone.

    Attributes:
        kept: on a stage that follows, what it has in the place of each, by number.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._dropped: list[int] = []
        self._count = 0

    def tell(self, cache: Any) -> dict[str, Any]:
        """Return JSON values that say which cache a call has, None for none, for `follow` of the other stages."""
        if cache is None:
            return {"cache": None, "dropped": self._gone()}
        number, new = self._number(cache)
        if new:
            for name in _REORDERING:
                setattr(cache, name, _refuse_reordering)
        return {"cache": number, "past": int(cache.get_seq_length()), "dropped": self._gone()}

    @contextmanager
    def follow(self, values: Mapping[str, Any], model: nn.Module) -> Iterator[dict[str, Any]]:
        """Give the arguments of the stage's forward that have its own cache, for the call within the context.

        Args:
            values: what `tell` returned on the first stage.
            model: the stage.
        """
        from transformers import DynamicCache

        self._drop(values)
        if values["cache"] is None:
            yield {"use_cache": False}
            return
        if values["cache"] not in self.kept:
            self.kept[values["cache"]] = DynamicCache(config=model.config)  # type: ignore[arg-type]
        cache = self.kept[values["cache"]]
        beyond = cache.get_seq_length() - values["past"]
        if beyond > 0:
            cache.crop(-beyond)
        yield {"use_cache": True, "past_key_values": cache}

    def _number(self, kept: Any) -> tuple[int, bool]:
        """Return the number of a cache, or of a part of one, and whether it has just been given."""
        if kept in self._numbers:
            return self._numbers[kept], False
        self._count += 1
        self._numbers[kept] = self._count
        weakref.finalize(kept, self._dropped.append, self._count).atexit = False
        return self._count, True

    def _gone(self) -> list[int]:
        """Return the numbers that nothing has any more, each once."""
        return [self._dropped.pop() for _ in range(len(self._dropped))]

    def _drop(self, values: Mapping[str, Any]) -> None:
        for number in values["dropped"]:
            self.kept.pop(number, None)
