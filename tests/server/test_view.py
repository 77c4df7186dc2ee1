"""A server shows its plan, its devices and its engine, as JSON's own types."""

from __future__ import annotations

import json
from pathlib import Path

from bigmodel.server import Settings
from bigmodel.server.engine import EngineOptions, build_engine
from bigmodel.server.loading import load
from bigmodel.server.state import ServerState
from bigmodel.server.view import view
from tests.server.tiny import tiny_model, tiny_tokenizer


def test_while_nothing_is_loaded_there_is_nothing_to_show() -> None:
    assert view(ServerState(Settings("tiny"))) == {"plan": None, "devices": [], "streamed": [], "engine": None}


def test_a_planned_model_shows_what_was_planned(tmp_path: Path) -> None:
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
