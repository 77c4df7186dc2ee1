"""Adapters are read as peft writes them, and refused by name where a part of them would be left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bigmodel.errors import BigModelError, ServeError
from bigmodel.server.adapters.files import read_adapter
from tests.server.adapters.trained import TARGETS, write_adapter
from tests.server.tiny import tiny_model

KEY = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tiny_model(), tmp_path / "adapter")


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_parts_are_named_as_the_models_modules(folder: Path) -> None:
    adapter = read_adapter("legal", folder)
    assert {name.rpartition(".")[2] for name in adapter.parts} == set(TARGETS)
    part = adapter.parts["model.layers.1.mlp.down_proj"]
    assert part.down.shape == (4, 128)
    assert part.up.shape == (64, 4)
    assert adapter.nbytes == sum(tensor.nbytes for tensor in load_file(folder / "adapter_model.safetensors").values())


def test_the_digest_is_that_of_what_is_computed(folder: Path, tmp_path: Path) -> None:
    first = read_adapter("legal", folder).digest
    change(folder, inference_mode=False, base_model_name_or_path="org/moved")
    assert read_adapter("terse", folder).digest == first
    others = {read_adapter("legal", write_adapter(tiny_model(), tmp_path / "other", seed=5)).digest}
    change(folder, lora_alpha=17)
    others.add(read_adapter("legal", folder).digest)
    change(folder, lora_alpha=16)
    assert read_adapter("legal", folder).digest == first
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors[KEY.format("A")][0, 0] += 1
    save_file(tensors, weights)
    others.add(read_adapter("legal", folder).digest)
    moved = {key.replace("layers.0.mlp", "layers.7.mlp"): tensor for key, tensor in tensors.items()}
    save_file(moved, weights)
    others.add(read_adapter("legal", folder).digest)
    assert len(others | {first}) == 5


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 16 / 4),
        ({"use_rslora": True}, 16 / 2),
        ({"alpha_pattern": {"down_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"layers.0.mlp.down_proj": 2}}, 16 / 4),
    ],
)
def test_the_scaling_is_pefts(settings: dict[str, Any], scaling: float, folder: Path) -> None:
    change(folder, **settings)
    assert read_adapter("legal", folder).parts["model.layers.1.mlp.down_proj"].scaling == scaling


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"alpha_pattern": {"layers.[01].mlp": 2}}, r"layers\.\[01\]"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(settings: dict[str, Any], says: str, folder: Path) -> None:
    change(folder, **settings)
    with pytest.raises(ServeError, match=says) as caught:
        read_adapter("legal", folder)
    assert "\n" not in str(caught.value)


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def torn(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{" * 100_000)


def rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_weights, "it has no weights"),
        (pickled, "pickled"),
        (torn, "adapter_model"),
        (no_config, "adapter_config"),
        (broken_config, "JSON"),
        (rewritten(lambda tensors: tensors.pop(KEY.format("A"))), "lora_B alone"),
        (rewritten(lambda tensors: tensors.update({KEY.format("A"): torch.zeros(3, 128)})), "ranks must agree"),
        (rewritten(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64)})), "model.norm.weight"),
        (rewritten(dict.clear), "no low ranks"),
    ],
)
def test_a_damaged_adapter_is_one_line(damage: Callable[[Path], None], says: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(BigModelError, match=says) as caught:
        read_adapter("legal", folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="cannot be read"):
        read_adapter("legal", tmp_path / "nothing")
