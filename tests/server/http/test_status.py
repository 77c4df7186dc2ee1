"""A server shows its plan, its devices and its engine, as JSON's own types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bigmodel.devices import memory_allocated, reset_peak_memory
from bigmodel.server import EngineOptions, Loaded
from bigmodel.server.http.status import view
from bigmodel.server.loading import load
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import ServedModel
from tests.server.tiny import tiny_model, tiny_tokenizer


def served(loaded: Loaded, **options: int) -> ServedModel:
    """A model with an engine that is not started."""
    return ServedModel("tiny", running=RunningModel.of("tiny", loaded, EngineOptions(**options)))


def test_the_status_is_empty_while_nothing_is_loaded() -> None:
    empty = {"plan": None, "devices": [], "streamed": [], "engine": None, "images": False}
    assert view(ServedModel("tiny")) == empty


@pytest.mark.slow
def test_the_status_of_a_planned_model_includes_its_plan(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    placed = load(str(tmp_path), max_memory={"cpu": "64MiB"}, context_length=128)
    shown = json.loads(json.dumps(view(served(placed, max_sequences=3))))
    assert shown["plan"] == json.loads(placed.plan.to_json())
    (cpu,) = shown["devices"]
    assert (cpu["device"], cpu["budget"]) == ("cpu", 64 << 20)
    assert cpu["predicted"] == sum(cpu["planned"].values())
    assert (shown["engine"]["state"], shown["engine"]["max_sequences"]) == ("new", 3)


def test_a_peak_that_the_host_does_not_record_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.devices.memory._STATUS", tmp_path / "no status")
    (cpu,) = view(served(Loaded(tiny_model(), tiny_tokenizer()), kv_bytes=1 << 20))["devices"]
    assert cpu["peak"] is None
    assert cpu["allocated"] > 0


def test_the_peak_is_never_below_what_is_allocated_though_the_process_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def grow_and_read(device: str) -> int:
        held.append(torch.ones(64 << 20, dtype=torch.uint8))
        return memory_allocated(device)

    monkeypatch.setattr("bigmodel.server.http.status.memory_allocated", grow_and_read)
    model = served(Loaded(tiny_model(), tiny_tokenizer()), kv_bytes=1 << 20)
    reset_peak_memory("cpu")
    (cpu,) = view(model)["devices"]
    assert cpu["peak"] >= cpu["allocated"]
