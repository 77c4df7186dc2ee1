"""Loaders whose last round is not filled up, for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.data.steps import MapSource

logger = logging.getLogger(__name__)


@contextmanager
def uneven_batches(loaders: Sequence[DataLoaderShard], even_batches: bool | None) -> Iterator[None]:
    """Within the body, set whether loaders of map-style datasets fill up their last round; None changes nothing."""
    changed = []
    if even_batches is not None:
        for loader in loaders:
            source = loader.source
            if isinstance(source, MapSource):
                changed.append((source.shard, source.shard.even_batches))
                source.shard.even_batches = even_batches
            else:
                logger.warning("even_batches has no effect on a loader of an iterable dataset")
    try:
        yield
    finally:
        for shard, before in changed:
            shard.even_batches = before
