"""The numbers of several servers as those of one: counters and histograms added up, and what is held now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Sample = tuple[str, tuple[tuple[str, str], ...]]  # its name and labels

_COUNTED = ("counter", "histogram")


def merge(live: Seq[str], gone: Seq[str] = ()) -> bytes:
    """The texts of several servers, each in the format of Prometheus, as one text.

    Counts add up, those of servers that have ``gone`` included, so that a total never falls. What is held now adds up
    over the ``live`` ones; a ratio is their mean, and a time of creation the earliest.
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
    """The values of one metric from every server that has it."""

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
