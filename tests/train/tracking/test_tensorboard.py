"""TensorBoard, read back from its event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigmodel.train import Accelerator

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)


@pytest.fixture
def events(tmp_path: Path) -> Any:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1, "model": {"layers": 2}, "names": ["a"]})
    accelerator.log({"loss": torch.tensor(0.5), "note": "hello"}, step=1)
    accelerator.log({"loss": 0.25}, step=2)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"sample": torch.zeros(2, 3, 4, 4)}, step=1)
    tracker.log_table("table", ["x", "y"], [[1, "a|b"]], step=1)
    accelerator.end_training()
    found = accumulator.EventAccumulator(str(tmp_path / "run"))
    return found.Reload()


def test_numbers_texts_images_and_tables_are_written(events: Any) -> None:
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert events.Tensors("note/text_summary")[0].tensor_proto.string_val[0] == b"hello"
    assert [(event.width, event.height) for event in events.Images("sample")] == [(8, 4)]
    table = events.Tensors("table/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.splitlines() == ["| x | y |", "| --- | --- |", "| 1 | a\\|b |"]


def test_hyperparameters_are_also_a_readable_file(events: Any, tmp_path: Path) -> None:
    stored = yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text())
    assert stored == {"lr": 0.1, "model/layers": 2, "names": "['a']"}
