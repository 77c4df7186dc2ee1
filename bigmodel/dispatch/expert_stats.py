"""What the caches of experts did, as people and the server are told it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .expert_cache import ExpertCache


def expert_stats(caches: Iterable[ExpertCache]) -> dict[str, dict[str, float]]:
    """Return by device what its caches did: hits, misses, fetches, bytes fetched from RAM and disk, seconds waited,
    the share of chosen experts that were hits, and the bytes the caches take."""
    counted: dict[str, dict[str, float]] = {}
    for cache in caches:
        stats = cache.stats.as_dict()
        here = counted.setdefault(str(cache.device), defaultdict(float))
        for name in ("hits", "misses", "fetches", "bytes_from_ram", "bytes_from_disk", "seconds_waited"):
            here[name] += stats[name]
        here["bytes_fetched"] += stats["bytes_from_ram"] + stats["bytes_from_disk"]
        here["cache_bytes"] += cache.nbytes
        here["hit_rate"] = here["hits"] / max(1, here["hits"] + here["misses"])
    return {device: dict(counters) for device, counters in counted.items()}
