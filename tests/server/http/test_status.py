"""A server shows its plan, its devices and its engine, as JSON's own types.

Bytes are counted where they lie, each once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.devices import memory_allocated, reset_peak_memory
from bigmodel.server import Settings
from bigmodel.server.engine import EngineOptions, build_engine
from bigmodel.server.http.state import ServerState
from bigmodel.server.http.status import view, weight_bytes
from bigmodel.server.loading import load
from tests.server.tiny import tiny_model, tiny_tokenizer


def test_the_status_is_empty_while_nothing_is_loaded() -> None:
    assert view(ServerState(Settings("tiny"))) == {"plan": None, "devices": [], "streamed": [], "engine": None}


@pytest.mark.slow
def test_the_status_of_a_planned_model_includes_its_plan(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    placed = load(str(tmp_path), max_memory={"cpu": "64MiB"}, context_length=128)
    engine = build_engine(placed.model, placed.tokenizer, placed.plan, EngineOptions(max_sequences=3))
    state = ServerState(Settings("tiny"), engine=engine, model=placed.model, plan=placed.plan)
    shown = json.loads(json.dumps(view(state)))
    assert shown["plan"] == json.loads(placed.plan.to_json())
    (cpu,) = shown["devices"]
    assert (cpu["device"], cpu["budget"]) == ("cpu", 64 << 20)
    assert cpu["predicted"] == sum(cpu["planned"].values())
    assert (shown["engine"]["state"], shown["engine"]["max_sequences"]) == ("new", 3)


def test_tied_weights_are_counted_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = layer.weight
    shared = nn.Linear(4, 4, bias=False)
    shared.weight = nn.Parameter(layer.weight.data)  # another tensor, the same memory
    assert weight_bytes(nn.Sequential(layer, tied, shared)) == {"cpu": 64}


def test_buffers_count_and_empty_tensors_do_not() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(3, dtype=torch.int16))
    module.register_buffer("nothing", torch.zeros(0))
    assert weight_bytes(module) == {"cpu": 6}


def test_views_of_a_checkpoint_are_on_disk(tmp_path: Path) -> None:
    from bigmodel.dispatch import from_pretrained

    model = tiny_model()
    model.save_pretrained(tmp_path)
    placed = from_pretrained(tmp_path, device_map={"": "disk"})
    found = weight_bytes(placed)
    assert found["disk"] == sum(p.nbytes for p in model.parameters())


def test_a_peak_that_the_host_does_not_record_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.devices.memory._STATUS", tmp_path / "no status")
    engine = build_engine(tiny_model(), tiny_tokenizer(), None, EngineOptions(kv_bytes=1 << 20))
    (cpu,) = view(ServerState(Settings("tiny"), engine=engine, model=engine.core.runner.model))["devices"]
    assert cpu["peak"] is None
    assert cpu["allocated"] > 0


def test_the_peak_is_never_below_what_is_allocated_though_the_process_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def grow_and_read(device: str) -> int:
        held.append(torch.ones(64 << 20, dtype=torch.uint8))
        return memory_allocated(device)

    monkeypatch.setattr("bigmodel.server.http.status.memory_allocated", grow_and_read)
    engine = build_engine(tiny_model(), tiny_tokenizer(), None, EngineOptions(kv_bytes=1 << 20))
    reset_peak_memory("cpu")
    (cpu,) = view(ServerState(Settings("tiny"), engine=engine, model=engine.core.runner.model))["devices"]
    assert cpu["peak"] >= cpu["allocated"]
