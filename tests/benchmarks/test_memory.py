"""Memory: predicted bytes of weights are those that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from bigmodel.benchmarks.checkpoints import checkpoint
from bigmodel.benchmarks.harness import procfs
from bigmodel.benchmarks.memory import load_and_generate, weights_by_device
from bigmodel.checkpoint import Checkpoint
from bigmodel.devices import memory as devices_memory
from bigmodel.devices import virtual

from ..quantized.checkpoints import published
from ..quantized.twins import packed
from .answering import answer, rows


def weights(found: dict[str, Any]) -> dict[str, int]:
    return {row["device"]: row["measured"] for row in rows(found) if row["what"] == "weights"}


@pytest.mark.slow
def test_on_the_host_every_weight_is_where_the_plan_has_it(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["memory"], workdir, capsys)
    total = Checkpoint.open(checkpoint("tiny", workdir)).total_bytes()
    assert weights(found) == {"cpu": total}
    assert all(limit["kept"] for limit in found["limits"])


@pytest.mark.slow
def test_over_an_accelerator_host_and_disk_every_limit_is_kept(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(["memory", "--device", "virtual", "--max-memory", "0=600KB,cpu=500KB"], workdir, capsys)
    total = Checkpoint.open(checkpoint("tiny", workdir)).total_bytes()
    assert set(weights(found)) == {"virtual:0", "cpu", "disk"}
    assert sum(weights(found).values()) == total
    assert all(limit["kept"] for limit in found["limits"])
    loaded = [row for row in rows(found) if row["what"] == "allocated after load"]
    assert [(row["device"], row["difference"]) for row in loaded] == [("virtual:0", 0)]


@pytest.mark.long
@pytest.mark.slow
def test_what_a_poor_host_cannot_tell_is_left_out_and_said(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "_PROCESS", workdir / "no-proc")
    monkeypatch.setattr(devices_memory, "_CLEAR_REFS", workdir / "no-proc" / "clear_refs")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(workdir / "no-proc"))
    found = load_and_generate(str(checkpoint("tiny", workdir)), "virtual", "0=600KB,cpu=2GB", 1, 32, "auto", None)
    measured = {device["name"]: set(device["measured"]) for device in found["devices"]}
    assert measured == {"virtual:0": {"weights", "allocated after load", "peak of a generation"}, "cpu": {"weights"}}
    assert sum("not measured on this host" in note for note in found["notes"]) == 2


@pytest.mark.slow
def test_a_quantised_checkpoint_takes_its_stored_bytes(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path / "q", packed(), vocab_size=256)
    capsys.readouterr()
    total = Checkpoint.open(tmp_path / "q").total_bytes()
    options = ["--device", "virtual", "--max-memory", "0=200KB,cpu=1GB", "--context", "32"]
    found = answer(["memory", str(tmp_path / "q"), *options], workdir, capsys)
    assert sum(weights(found).values()) == total
    assert set(weights(found)) == {"virtual:0", "cpu"}
    assert all(limit["kept"] for limit in found["limits"])


def test_tied_weights_count_once_and_views_of_files_as_disk(workdir: Path) -> None:
    virtual.enable(count=1)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model[2].to("virtual:0")
    shown = Checkpoint.open(checkpoint("tiny", workdir)).tensor("model.norm.weight")
    model.register_parameter("norm", nn.Parameter(shown))
    assert weights_by_device(model) == {"cpu": 256, "virtual:0": 256, "disk": shown.nbytes}
    assert shown.dtype == torch.float32
