"""Metrics and views of several servers merge into those of one."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bigmodel.server.replicas.merge import merge_metrics, merge_views


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
    assert values(merge_metrics([text(3, 1, 0.5, 0.5), text(4, 2, 0.1, 5.0)])) == {
        "requests_total ok": 7,
        "running": 3,
        "kv_usage_ratio": 0.3,
        "step_seconds_bucket 1.0": 1,
        "step_seconds_bucket 10.0": 2,
        "step_seconds_bucket +Inf": 2,
        "step_seconds_count": 2,
        "step_seconds_sum": 5.5,
    }


def test_the_metrics_of_one_server_are_unchanged() -> None:
    alone = text(3, 1, 0.5, 0.5)
    assert merge_metrics([alone]).decode() == alone


def test_counts_of_a_lost_server_are_kept() -> None:
    merged = values(merge_metrics([text(3, 1, 0.5, 0.5)], gone=[text(4, 2, 0.1, 5.0)]))
    assert (merged["requests_total ok"], merged["step_seconds_count"]) == (7, 2)
    assert (merged["running"], merged["kv_usage_ratio"]) == (1, 0.5)


def test_labels_are_kept_apart() -> None:
    registry = CollectorRegistry()
    Counter("requests", "Requests by outcome", ["outcome"], registry=registry).labels("timeout").inc(1)
    merged = values(merge_metrics([text(3, 1, 0.5, 0.5), generate_latest(registry).decode()]))
    assert (merged["requests_total ok"], merged["requests_total timeout"]) == (3, 1)


def device(name: str, weights: int, budget: int | None = 100, planned: dict[str, int] | None = None) -> dict[str, Any]:
    return {"device": name, "weights": weights, "budget": budget, "planned": planned}


def engine(running: int, max_length: int = 64, **changes: Any) -> dict[str, Any]:
    kv = {"used": running, "capacity": 10}
    return {"state": "running", "running": running, "max_length": max_length, "kv_tokens": kv, **changes}


def shown(engine: Any, devices: list[dict[str, Any]], streamed: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"plan": None, "devices": devices, "streamed": streamed or [], "engine": engine, "images": False}


def test_bytes_add_up_by_device() -> None:
    merged = merge_views(
        [
            shown(None, [device("cuda:0", 3, planned={"kv": 1}), device("cpu", 5)]),
            shown(None, [device("cuda:0", 4, planned={"kv": 2})]),
        ]
    )
    assert merged["devices"] == [device("cuda:0", 7, 200, {"kv": 3}), device("cpu", 5)]


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    (merged,) = merge_views([shown(None, [device("cpu", 1, 9)]), shown(None, [device("cpu", 2, None)])])["devices"]
    assert (merged["weights"], merged["budget"]) == (3, None)


def test_streamed_bytes_add_up_by_device() -> None:
    entries = [[{"device": "cuda:0", "bytes_from_ram": n, "seconds_waited": n / 2}] for n in (1, 2)]
    merged = merge_views([shown(None, [], streamed) for streamed in entries])
    assert merged["streamed"] == [{"device": "cuda:0", "bytes_from_ram": 3, "seconds_waited": 1.5}]


def test_shares_become_their_mean() -> None:
    entries = [[{"device": "cuda:0", "hits": n, "hit_rate": n / 4, "reuse": n / 8}] for n in (1, 3)]
    merged = merge_views([shown(None, [], streamed) for streamed in entries])
    assert merged["streamed"] == [{"device": "cuda:0", "hits": 4, "hit_rate": 0.5, "reuse": 0.25}]


def test_stages_are_merged_by_device() -> None:
    def stages(device: str, idle: float) -> dict[str, Any]:
        return {"most": 2, "now": 1, "devices": [{"device": device, "busy_seconds": 1.0, "idle_share": idle}]}

    views = [shown(engine(1, stages=stages(device, 0.5)), []) for device in ("cuda:0", "cuda:1")]
    both = [{"device": f"cuda:{each}", "busy_seconds": 1.0, "idle_share": 0.5} for each in (0, 1)]
    assert merge_views(views)["engine"]["stages"] == {"most": 4, "now": 2, "devices": both}
    views = [shown(engine(1, stages=stages("cuda:0", idle)), []) for idle in (0.25, 0.75)]
    assert merge_views(views)["engine"]["stages"]["devices"] == [
        {"device": "cuda:0", "busy_seconds": 2.0, "idle_share": 0.5}
    ]


def test_engine_counts_add_up_and_common_values_are_kept() -> None:
    merged = merge_views([shown(engine(1, 64), []), shown(engine(2, 32, state="draining"), []), shown(None, [])])
    assert merged["engine"] == {
        "state": None,
        "running": 3,
        "max_length": 32,
        "kv_tokens": {"used": 3, "capacity": 20},
    }


def test_the_merged_status_has_no_engine_while_all_load() -> None:
    nothing = {"devices": [], "streamed": [], "engine": None, "images": False}
    assert merge_views([shown(None, []), shown(None, [])]) == nothing


def test_images_are_taken_where_one_of_them_takes_some() -> None:
    assert merge_views([shown(None, []), {**shown(None, []), "images": True}])["images"]


def test_the_view_of_one_server_is_unchanged() -> None:
    alone = shown(engine(1), [device("cpu", 5)])
    assert merge_views([alone]) == {key: alone[key] for key in ("devices", "streamed", "engine", "images")}
