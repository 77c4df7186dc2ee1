"""`bigmodel quantize`: what it says, and that it keeps to its memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.cli.main import run
from bigmodel.devices import parse_size
from tests.preloaded import run as run_program

from ..quantized.checkpoints import LAYERS, llama

BUDGET = "64MiB"
SCRIPT = """
import json, sys
import torch
from bigmodel.cli.main import run
from bigmodel.verify.peak_rss import PeakRSS, resolution, return_freed_memory_at_once

torch.set_num_threads(1)
source, target, small, budget = sys.argv[1:]
run(["quantize", small, f"{target}-small", "--to", "int4", "--group-size", "32"])  # libraries take their own memory
return_freed_memory_at_once()
with PeakRSS(files=True) as rss:
    code = run(["quantize", source, target, "--to", "int4", "--group-size", "32", "--max-memory", budget])
print(json.dumps({"code": code, "grown": rss.grown, "resolution": resolution()}))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.slow
def test_it_keeps_to_its_memory(small: Path, tmp_path: Path) -> None:
    # Large, since the intermediate results that every budget has to hold are of 40 MiB.
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 256}
    with torch.device("meta"):
        model = llama(**sizes)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path / "full")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    arguments = [tmp_path / "full", tmp_path / "out", small, BUDGET]
    done = run_program(["-c", SCRIPT, *arguments], dict(os.environ), modules=["bigmodel.verify.verify"])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0
    assert found["grown"] <= parse_size(BUDGET) + found["resolution"] < nbytes


def test_it_says_what_it_has_written(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["quantize", str(small), str(tmp_path / "out"), "--to", "int8"]) == 0
    assert f"{7 * LAYERS} weights quantised to int8" in capsys.readouterr().out
    assert run(["quantize", str(small), str(tmp_path / "out"), "--to", "int8"]) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err
