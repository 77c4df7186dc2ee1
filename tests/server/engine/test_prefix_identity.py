"""What keeps prompts of one model apart from another's: the checkpoint's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bigmodel.server.engine.prefix_identity import checkpoint_digest
from bigmodel.sources.resolve import open_source
from tests.server.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def digest(folder: Path) -> str:
    return checkpoint_digest(open_source(folder))


def test_the_same_files_have_the_same_digest_wherever_they_are(folder: Path) -> None:
    moved = folder.rename(folder.with_name("b"))
    before = digest(moved)
    shutil.copytree(moved, folder)  # with the files' times
    assert digest(folder) == before


@pytest.mark.parametrize("what", ["config", "last bytes", "time"])
def test_a_change_of_config_weights_or_time_is_another_digest(folder: Path, what: str) -> None:
    before = digest(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    if what == "config":
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    elif what == "time":
        os.utime(weights, ns=(times[0], times[1] + 1))
    else:
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(weights, ns=times)
    assert digest(folder) != before
