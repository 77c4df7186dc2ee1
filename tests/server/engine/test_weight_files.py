"""A file of weights that is cut short fails requests; the process that has it mapped goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigmodel.errors import CheckpointFormatError
from bigmodel.server import EngineOptions
from bigmodel.server.engine import Failed, build_engine
from bigmodel.server.engine.weight_files import WeightFiles
from bigmodel.server.loading import load
from tests.server.models.several import CONTEXT, SEQUENCES, save
from tests.server.tiny import ask, tiny_model


def test_weights_that_are_not_mapped_have_no_files() -> None:
    WeightFiles(tiny_model(), None).check()


@pytest.mark.slow
def test_requests_fail_while_a_file_is_too_short(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, 0), max_memory={"cpu": "1GiB"}, batch_size=SEQUENCES, context_length=CONTEXT)
    engine = build_engine(loaded.model, loaded.tokenizer, loaded.plan, EngineOptions(max_sequences=SEQUENCES))
    engine.start()
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    before = ask(engine, "the cat", temperature=0.0, max_tokens=2)
    before.wait()
    os.truncate(path, 10)
    with pytest.raises(CheckpointFormatError, match="cut short while in use"):
        WeightFiles(loaded.model).check()
    failed = ask(engine, "the cat", max_tokens=2).wait()
    assert isinstance(failed, Failed)
    assert "cut short" in failed.message
    path.write_bytes(whole)
    after = ask(engine, "the cat", temperature=0.0, max_tokens=2)
    after.wait()
    engine.stop()
    assert after.tokens() == before.tokens() != []
