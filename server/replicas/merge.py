"""Merge what several replicas report: their metrics, and their bodies of GET /plan, as those of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Sample = tuple[str, tuple[tuple[str, str], ...]]  # name and labels

_COUNTED = ("counter", "histogram")


def merge_metrics(live: Seq[str], gone: Seq[str] = ()) -> bytes:
    """Merge metrics of several servers, each in the format of Prometheus.

    Counters and histograms add up, including those of servers that have ``gone``, so that totals never fall. Gauges add
    up over ``live`` servers; ratios become their mean, times of creation the earliest.
    """
    merged: dict[str, _Merged] = {}
    for text in live:
        for family in text_string_to_metric_families(text):
            merged.setdefault(family.name, _Merged(family)).add(family)
    for text in gone:
        for family in text_string_to_metric_families(text):
            if family.type in _COUNTED:
                merged.setdefault(family.name, _Merged(family)).add(family)
    registry = CollectorRegistry()
    registry.register(_Families([entry.family() for entry in merged.values()]))
    return generate_latest(registry)


class _Merged:
    """Values of one metric from every server that has it."""

    def __init__(self, like: Metric) -> None:
        self._like = like
        self._values: dict[Sample, list[float]] = {}

    def add(self, family: Metric) -> None:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            self._values.setdefault(key, []).append(sample.value)

    def family(self) -> Metric:
        like, combine = self._like, _combination(self._like.name)
        family = Metric(like.name, like.documentation, like.type)
        for (name, labels), values in self._values.items():
            family.add_sample(name, dict(labels), combine(values))
        return family


def _combination(name: str) -> Callable[[Seq[float]], float]:
    if name.endswith("_created"):
        return min
    return _mean if name.endswith("_ratio") else sum


def _mean(values: Seq[float]) -> float:
    return sum(values) / len(values)


class _Families(Collector):
    def __init__(self, families: Seq[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


# Settings of an engine, as opposed to counts and capacities.
_SETTINGS = ("state", "runner", "row_multiple", "host_linear", "max_batch_tokens", "alone", "together")
_SHARES = ("hit_rate", "link_busy", "reuse", "idle_share")


def merge_views(views: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Merge ``devices``, ``streamed``, ``engine`` and ``images`` of several bodies of GET /plan.

    Bytes and counts add up, by device name; a sum with an unknown part is None. Shares become their mean. Settings of
    an engine are those that all engines share, else None, and the shortest ``max_length``. Engines that are not there
    yet count nothing.
    """
    engines = [view["engine"] for view in views if view["engine"] is not None]
    return {
        "devices": _by_device([entry for view in views for entry in view["devices"]]),
        "streamed": _by_device([entry for view in views for entry in view["streamed"]]),
        "images": any(view["images"] for view in views),
        "engine": _combined(engines) if engines else None,
    }


def _by_device(entries: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    together: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        together.setdefault(entry["device"], []).append(entry)
    return [_combined(same) for same in together.values()]


def _combined(entries: Seq[dict[str, Any]]) -> dict[str, Any]:
    """One entry of all: each field the sum of theirs, except those in `_SPECIAL`."""
    return {key: _SPECIAL.get(key, _sum)([entry[key] for entry in entries]) for key in entries[0]}


def _sum(values: Seq[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], list):
        return _by_device([entry for value in values for entry in value])
    return _combined(values) if isinstance(values[0], dict) else sum(values)


def _alike(values: Seq[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


_SPECIAL: dict[str, Callable[[Seq[Any]], Any]] = {
    "device": _alike,
    "max_length": min,
    **dict.fromkeys(_SETTINGS, _alike),
    **dict.fromkeys(_SHARES, _mean),
}
