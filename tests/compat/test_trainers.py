"""transformers' Trainer on two launched processes, plainly, sharded and by DeepSpeed: they inherit the stand-in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .answers import answers
from .test_stand_in import VERSION


@pytest.mark.slow  # a launcher and two interpreters that import transformers; one start for all kinds
def test_it_trains_and_resumes_with_the_losses_of_plain_training(tmp_path: Path) -> None:
    kinds = ["plain", "fsdp", *(["deepspeed 2"] if importlib.util.find_spec("deepspeed") else [])]
    launch = ("-m", "bigmodel", "launch", "--cpu", "--num_processes", "2")
    environment = {"BIGMODEL_COMPAT": "1", "DS_ACCELERATOR": "cpu", "XDG_CONFIG_HOME": str(tmp_path)}
    found = answers("trainers", str(tmp_path), *kinds, before=launch, **environment)
    for kind in kinds:
        for rank in (0, 1):
            assert found[f"{kind}: losses {rank}"] == pytest.approx(found["plain: losses 0"], rel=1e-6), kind
            assert found[f"{kind}: resumed {rank}"], kind
            assert found[f"{kind}: saved {rank}"], kind
    assert (found["version 0"], found["version 1"]) == (VERSION, VERSION)
    assert len(found) == 2 + 6 * len(kinds)
