"""Metrics of a model for Prometheus: requests, tokens, latencies, memory, streaming."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bigmodel.server.engine.compute.planned_draft import PlannedDrafter
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.scheduling.request import Observer, Request
from bigmodel.server.http.state import ServerState
from bigmodel.server.http.status import EXPERTS, devices, stages, streamed
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import ServedModel

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Observer):
    """Records what a model's engine reports, in a registry of its own: several servers may share a process."""

    def __init__(self, state: ServerState, served: ServedModel) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._requests = Counter("bigmodel_requests", "Requests by outcome", ["outcome"], registry=r)
        self._prompt = Counter("bigmodel_prompt_tokens", "Prompt tokens computed", registry=r)
        self._generated = Counter("bigmodel_generated_tokens", "Tokens generated", registry=r)
        self._queue = _histogram("bigmodel_queue_seconds", "Time from arrival to the first step", r)
        self._first = _histogram("bigmodel_time_to_first_token_seconds", "Time from arrival to a token", r)
        self._next = _histogram("bigmodel_inter_token_seconds", "Time between tokens of a sequence", r)
        self._whole = _histogram("bigmodel_request_seconds", "Time from arrival to the end", r)
        self._step = _histogram("bigmodel_step_seconds", "Time of an engine step", r)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self._batch = Histogram("bigmodel_step_sequences", "Sequences in a step", registry=r, buckets=sizes)
        names = ["key", "kind"]
        self._of_keys = Counter("bigmodel_key_tokens", "Tokens by key and kind", names, registry=r)
        self._state = state
        self._model = served.name
        r.register(_State(served))

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    # --- observer ---------------------------------------------------------------------------------

    def started(self, request: Request, waited: float) -> None:
        self._queue.observe(waited)
        self._take(request, "prompt", len(request.prompt))

    def tokens(self, prompt: int, generated: int) -> None:
        if prompt:
            self._prompt.inc(prompt)
        if generated:
            self._generated.inc(generated)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def finished(self, request: Request, outcome: str, seconds: float) -> None:
        self._requests.labels(outcome).inc()
        self._take(request, "generated", request.completion_tokens)
        if request.trace is not None and self._state.telemetry is not None:
            self._state.telemetry.finished(request, outcome, self._model)
        self._whole.observe(seconds)

    def step(self, seconds: float, sequences: int) -> None:
        self._step.observe(seconds)
        self._batch.observe(sequences)

    def _take(self, request: Request, kind: str, tokens: int) -> None:
        """Count tokens of a request in the name of its key."""
        if request.key:
            self._of_keys.labels(request.key, kind).inc(tokens)
            self._state.keys.take_tokens(request.key, tokens)

    def refused(self, status: int) -> None:
        """Count a request answered with an error before it reached the engine."""
        self._requests.labels(f"refused_{status}").inc()


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, registry=registry, buckets=_SECONDS)


class _State(Collector):
    """Values read from the model at each scrape, rather than counted as they occur."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        with self._served.reading() as running:
            found = [] if running is None else [*self._engine(running.engine), *self._stages(running.engine)]
            return iter([*found, *self._devices(running)])

    def _engine(self, engine: Engine) -> Iterator[Metric]:
        scheduler = engine.core.scheduler
        running = len(scheduler.running)
        gauges = {
            "bigmodel_running_sequences": ("Sequences in the batch", running),
            "bigmodel_waiting_sequences": ("Sequences waiting to run", engine.waiting),
            "bigmodel_kv_usage_ratio": ("Key-value positions in use", scheduler.pool.used / scheduler.pool.capacity),
            "bigmodel_prefix_cache_blocks": ("Prompt blocks kept", len(scheduler.prefix)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        counters = {
            "bigmodel_preemptions": ("Sequences preempted and recomputed", scheduler.preemptions),
            "bigmodel_draft_tokens": ("Tokens proposed by the draft model", engine.core.counts.drafted),
            "bigmodel_draft_accepted_tokens": ("Proposed tokens accepted", engine.core.counts.accepted),
            "bigmodel_prefix_cache_hit_tokens": ("Prompt tokens served from the cache", scheduler.prefix.hits),
            "bigmodel_prefix_cache_looked_up_tokens": ("Prompt tokens looked up", scheduler.prefix.lookups),
        }
        if isinstance(engine.core.drafter, PlannedDrafter):
            skipped = engine.core.drafter.skipped
            counters["bigmodel_speculation_skipped_steps"] = (
                "Steps without proposed tokens, as these were predicted to be slower",
                skipped,
            )
        files = scheduler.prefix.files
        if files is not None:
            counters |= {
                "bigmodel_prefix_files_restored_tokens": ("Prompt tokens read from files", files.restored),
                "bigmodel_prefix_files_written_bytes": ("Bytes of prompt blocks written to files", files.written),
                "bigmodel_prefix_files_refused": ("Files of prompt blocks that were torn or wrong", files.refused),
            }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value)

    def _stages(self, engine: Engine) -> Iterator[Metric]:
        found = stages(engine)
        if found is None:
            return
        yield GaugeMetricFamily("bigmodel_steps_in_flight", "Steps that are computed now", found["now"])
        active = CounterMetricFamily(
            "bigmodel_stage_active_seconds", "Time with any step in flight, by device", labels=["device"]
        )
        busy = CounterMetricFamily(
            "bigmodel_stage_busy_seconds", "Time of a device with a step in its stages", labels=["device"]
        )
        idle = GaugeMetricFamily(
            "bigmodel_stage_idle_ratio", "Share of the active time in which a device was idle", labels=["device"]
        )
        for each in found["devices"]:
            active.add_metric([each["device"]], each["active_seconds"])
            busy.add_metric([each["device"]], each["busy_seconds"])
            idle.add_metric([each["device"]], each["idle_share"])
        yield from (active, busy, idle)

    def _devices(self, running: RunningModel | None) -> Iterator[Metric]:
        memory = GaugeMetricFamily("bigmodel_device_bytes", "Bytes by device and kind", labels=["device", "kind"])
        for entry in [] if running is None else devices(running, self._served.loading.before):
            for kind in ("weights", "kv_used", "kv_capacity", "predicted", "budget", "allocated", "peak"):
                if entry[kind] is not None:
                    memory.add_metric([entry["device"], kind], entry[kind])
        yield memory
        moved = CounterMetricFamily(
            "bigmodel_streamed_bytes", "Weights, and keys and values, fetched", labels=["device", "tier"]
        )
        waited = CounterMetricFamily(
            "bigmodel_stream_wait_seconds", "Time forwards waited for these", labels=["device"]
        )
        chosen = CounterMetricFamily(
            "bigmodel_chosen_experts", "Experts that routers chose, by where they were", labels=["device", "found"]
        )
        for entry in [] if running is None else streamed(running):
            if entry["device"].endswith(EXPERTS):
                device, missing = entry["device"].removesuffix(EXPERTS), entry["misses"] - entry["on_host"]
                for found, count in (("cached", entry["hits"]), ("fetched", missing), ("host", entry["on_host"])):
                    chosen.add_metric([device, found], count)
            moved.add_metric([entry["device"], "ram"], entry["bytes_from_ram"])
            moved.add_metric([entry["device"], "disk"], entry["bytes_from_disk"])
            waited.add_metric([entry["device"]], entry["seconds_waited"])
        yield moved
        yield waited
        yield chosen
