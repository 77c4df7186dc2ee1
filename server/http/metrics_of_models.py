"""Metrics of a server with several models: those of each, with its name as a label, and the server's own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bigmodel.server.http.metrics import Metrics
from bigmodel.server.http.state import ServerState
from bigmodel.server.models.budgets import shown_device

LABEL = "model"

DEVICES = "bigmodel_device_bytes"

_OF_DEVICES = ("allocated", "peak")
"""Kinds of a device's bytes that are all models' together."""


class MetricsOfModels:
    """The metrics of the models, by name, as one; ``registry`` has them all.

    Requests that reached no engine have no model.
    """

    def __init__(self, state: ServerState, models: dict[str, Metrics]) -> None:
        self.registry = CollectorRegistry()
        own = CollectorRegistry()
        self._requests = Counter("bigmodel_requests", "Requests by outcome", ["outcome"], registry=own)
        registries = {"": own} | {name: each.registry for name, each in models.items()}
        budgets = {shown_device(key): size for key, size in state.pool.budgets.items()}
        self.registry.register(_Labelled(registries, budgets))
        self.registry.register(_Loaded(state))

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """Count a request answered with an error before it reached an engine."""
        self._requests.labels(f"refused_{status}").inc()


class _Labelled(Collector):
    """Metrics of several registries; each sample has the name of its registry as a label, unless that is empty."""

    def __init__(self, registries: dict[str, CollectorRegistry], budgets: dict[str, int]) -> None:
        self._registries = registries
        self._budgets = budgets

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        of_devices = {(device, "budget"): float(size) for device, size in self._budgets.items()}
        for name, registry in self._registries.items():
            for found in registry.collect():
                like = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    kind = sample.labels.get("kind", "")
                    if found.name == DEVICES and kind in _OF_DEVICES:
                        of_devices[sample.labels["device"], kind] = sample.value
                    elif found.name != DEVICES or kind != "budget":  # what the others left it
                        labels = {LABEL: name, **sample.labels} if name else sample.labels
                        like.add_sample(sample.name, labels, sample.value)
        for (device, kind), value in of_devices.items():
            families[DEVICES].add_sample(DEVICES, {"device": device, "kind": kind}, value)
        yield from families.values()


class _Loaded(Collector):
    """Which models are loaded, and their shares of the budgets."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("bigmodel_loaded", "Whether a model is loaded", labels=[LABEL])
        claimed = GaugeMetricFamily("bigmodel_claimed_bytes", "Most bytes of a model", labels=[LABEL, "device"])
        for served in self._state.models.values():
            loaded.add_metric([served.name], float(served.usable))
            for key, size in served.claimed.items():
                claimed.add_metric([served.name, shown_device(key)], size)
        yield from (loaded, claimed)
