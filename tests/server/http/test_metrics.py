"""What /metrics and /plan say is what happened."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bigmodel.dispatch import dispatch_model
from tests.server.live import MODEL, serving, tiny_app
from tests.server.tiny import tiny_model


def read(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(url: str, name: str, **labels: str) -> float:
    return read(url).get((name, tuple(sorted(labels.items()))), 0.0)


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1] * 20, "max_tokens": 5, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.slow
def test_requests_tokens_and_times_are_counted() -> None:
    with serving(tiny_app()) as url:
        for _ in range(3):
            assert complete(url).status_code == 200
        assert complete(url, temperature=9).status_code == 400
        assert value(url, "bigmodel_requests_total", outcome="ok") == 3
        assert value(url, "bigmodel_requests_total", outcome="refused_400") == 1
        assert value(url, "bigmodel_prompt_tokens_total") == 60
        assert value(url, "bigmodel_generated_tokens_total") == 15
        for name in ("queue", "time_to_first_token", "request"):
            assert value(url, f"bigmodel_{name}_seconds_count") == 3
        assert value(url, "bigmodel_inter_token_seconds_count") == 12
        assert value(url, "bigmodel_step_seconds_count") >= 15
        assert value(url, "bigmodel_running_sequences") == 0
        assert not [name for name, labels in read(url) if "key" in dict(labels)]  # an address is no key
        assert value(url, "bigmodel_kv_usage_ratio") == 0
        assert value(url, "bigmodel_device_bytes", device="cpu", kind="weights") > 0


@pytest.mark.slow
def test_streamed_bytes_are_shown_by_tier() -> None:
    model = tiny_model()
    model.dispatch_stats = lambda: {"cuda:0": {"bytes_from_ram": 7, "bytes_from_disk": 9, "seconds_waited": 0.5}}
    with serving(tiny_app(model)) as url:
        assert value(url, "bigmodel_streamed_bytes_total", device="cuda:0", tier="ram") == 7
        assert value(url, "bigmodel_streamed_bytes_total", device="cuda:0", tier="disk") == 9
        assert value(url, "bigmodel_stream_wait_seconds_total", device="cuda:0") == 0.5
        assert httpx.get(f"{url}/plan").json()["streamed"] == [
            {"device": "cuda:0", "bytes_from_ram": 7, "bytes_from_disk": 9, "seconds_waited": 0.5}
        ]


@pytest.mark.slow
def test_experts_and_keys_and_values_that_are_fetched_are_apart() -> None:
    model = tiny_model()
    own = {"bytes_from_ram": 7, "bytes_from_disk": 9, "seconds_waited": 0.5}
    chosen = {"hits": 6, "misses": 5, "on_host": 3}
    model.dispatch_stats = lambda: {"experts": {"cuda:0": {**own, **chosen}}, "kv": {**own, "held_on_disk": 3}}
    with serving(tiny_app(model)) as url:
        for device in ("cuda:0, experts", "kv"):
            assert value(url, "bigmodel_streamed_bytes_total", device=device, tier="disk") == 9
        for found, count in (("cached", 6), ("fetched", 2), ("host", 3)):
            assert value(url, "bigmodel_chosen_experts_total", device="cuda:0", found=found) == count
        assert [each["device"] for each in httpx.get(f"{url}/plan").json()["streamed"]] == ["cuda:0, experts", "kv"]


@pytest.mark.slow
def test_the_plan_route_shows_placement_and_the_engine() -> None:
    model = tiny_model()
    weights = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    with serving(tiny_app(model, engine={"max_sequences": 3})) as url:
        complete(url)
        shown = httpx.get(f"{url}/plan").json()
        (cpu,) = shown["devices"]
        assert (cpu["device"], cpu["weights"]) == ("cpu", weights)
        assert cpu["allocated"] > 0
        assert cpu["peak"] >= cpu["allocated"] > cpu["weights"]
        assert cpu["kv_capacity"] <= 64 << 20
        engine = shown["engine"]
        assert (engine["state"], engine["max_sequences"], engine["generated_tokens"]) == ("running", 3, 5)


@pytest.mark.slow
@pytest.mark.virtual_only("several accelerators")
@pytest.mark.usefixtures("accelerators")
def test_the_bubbles_of_stages_are_shown() -> None:
    places = {"model.embed_tokens": "virtual:0", "model.rotary_emb": "virtual:0", "model.layers.0": "virtual:0"}
    places |= {"model.layers.1": "virtual:1", "model.norm": "virtual:1", "lm_head": "virtual:1"}
    with serving(tiny_app(dispatch_model(tiny_model(), places), engine={"steps_in_flight": 2})) as url:
        assert complete(url).status_code == 200
        for device in ("virtual:0", "virtual:1"):
            assert value(url, "bigmodel_stage_busy_seconds_total", device=device) > 0
            assert value(url, "bigmodel_stage_active_seconds_total", device=device) > 0
            assert 0 <= value(url, "bigmodel_stage_idle_ratio", device=device) < 1
        stages = httpx.get(f"{url}/plan").json()["engine"]["stages"]
        assert (stages["most"], len(stages["devices"])) == (2, 2)
