"""The numbers of several servers read as those of one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bigmodel.server.merged_metrics import merge


def text(ok: int, running: int, ratio: float, seconds: float) -> str:
    """What one server says."""
    registry = CollectorRegistry()
    Counter("requests", "Requests by outcome", ["outcome"], registry=registry).labels("ok").inc(ok)
    Gauge("running", "Sequences in the batch", registry=registry).set(running)
    Gauge("kv_usage_ratio", "Positions in use", registry=registry).set(ratio)
    Histogram("step_seconds", "Time of a step", registry=registry, buckets=(1, 10)).observe(seconds)
    return generate_latest(registry).decode()


def values(merged: bytes) -> dict[str, float]:
    """Each sample by its name and labels, times of creation left out."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(merged.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counts_add_up_and_a_ratio_is_the_mean() -> None:
    assert values(merge([text(3, 1, 0.5, 0.5), text(4, 2, 0.1, 5.0)])) == {
        "requests_total ok": 7,
        "running": 3,
        "kv_usage_ratio": 0.3,
        "step_seconds_bucket 1.0": 1,
        "step_seconds_bucket 10.0": 2,
        "step_seconds_bucket +Inf": 2,
        "step_seconds_count": 2,
        "step_seconds_sum": 5.5,
    }


def test_one_server_reads_as_itself() -> None:
    alone = text(3, 1, 0.5, 0.5)
    assert merge([alone]).decode() == alone


def test_of_a_server_that_is_gone_the_counts_stay() -> None:
    merged = values(merge([text(3, 1, 0.5, 0.5)], gone=[text(4, 2, 0.1, 5.0)]))
    assert (merged["requests_total ok"], merged["step_seconds_count"]) == (7, 2)
    assert (merged["running"], merged["kv_usage_ratio"]) == (1, 0.5)


def test_labels_are_kept_apart() -> None:
    registry = CollectorRegistry()
    Counter("requests", "Requests by outcome", ["outcome"], registry=registry).labels("timeout").inc(1)
    merged = values(merge([text(3, 1, 0.5, 0.5), generate_latest(registry).decode()]))
    assert (merged["requests_total ok"], merged["requests_total timeout"]) == (3, 1)
