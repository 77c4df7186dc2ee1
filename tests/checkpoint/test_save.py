from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from bigmodel.checkpoint import Checkpoint, load_checkpoint_in_model, mapped_region, save_model
from bigmodel.checkpoint.save import split_shards
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import CheckpointError, SizeError
from tests.checkpoint.helpers import Tied, assert_same, on_meta, same_bits, save_sharded, saved_tensors, state_dicts
from tests.checkpoint.transformers_models import MODELS, model_class


@pytest.mark.slow
@given(state_dicts(), st.integers(1, 300), st.booleans())
def test_saved_tensors_are_loaded_again(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], shard_size: int, safe: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    save_model(tensors, folder, shard_size, safe)
    assert_same(Checkpoint.open(folder), tensors)
    largest = max(tensor.nbytes for tensor in tensors.values())
    checkpoint = Checkpoint.open(folder)
    for file in checkpoint.shards:
        held = sum(checkpoint.entry(name).nbytes for name in checkpoint if checkpoint.file(name) == file)
        assert held <= max(shard_size, largest)


def test_a_module_is_saved_with_its_buffers_and_root_parameters_and_ties_once(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}
    assert_same(Checkpoint.open(tmp_path), saved_tensors(model))
    assert "head.weight" not in Checkpoint.open(tmp_path)
    assert "position" not in Checkpoint.open(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_is_saved_in_shards_with_an_index(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, tmp_path, max_shard_size=200)
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.shards) == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": checkpoint.total_bytes()}
    assert_same(checkpoint, saved_tensors(model))


def test_a_state_dict_stores_one_memory_once_and_parts_of_it_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "same": whole.detach(), "row": whole[1], "turned": whole.t(), "equal": whole.clone()}
    save_model(tensors, tmp_path)
    del tensors["same"]
    assert_same(Checkpoint.open(tmp_path), tensors)


def test_empty_tensors_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.empty(0, 3), "c": torch.empty(0, 3, dtype=torch.int8)}
    save_model(tensors, tmp_path)
    assert_same(Checkpoint.open(tmp_path), tensors)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "legacy"])
def test_a_placed_model_is_saved_whole(tmp_path: Path, accelerators: None, safe: bool) -> None:
    full = saved_tensors(Tied())
    save_sharded(tmp_path / "old", full, shards=2)
    model = on_meta(Tied())
    load_checkpoint_in_model(model, tmp_path / "old", {"": 0, "layers.0": "disk", "layers.1": 1, "scale": "cpu"})
    save_model(model, tmp_path / "new", max_shard_size=200, safe_serialization=safe)
    assert_same(Checkpoint.open(tmp_path / "new"), full)


@pytest.mark.parametrize("device", ["disk", "cpu"])
def test_a_model_can_be_saved_over_the_files_it_is_mapped_from(tmp_path: Path, device: str) -> None:
    full = saved_tensors(Tied())
    save_model(full, tmp_path, max_shard_size=200)
    model = on_meta(Tied())
    load_checkpoint_in_model(model, tmp_path, {"": device})
    with torch.no_grad():
        model.scale.mul_(3)
    for size in (200, "1GB", 100):
        save_model(model, tmp_path, max_shard_size=size)
        expected = full | {"scale": full["scale"] * 3}
        assert_same(Checkpoint.open(tmp_path), expected)
        assert_same(model.state_dict(), expected | {"head.weight": full["embed.weight"]})
    if device == "disk":
        region = mapped_region(model.scale)
        assert region is not None
        assert region.open() is None, "the file of that name is another one now"


MIB = 2**20


def memory_growth(work: Callable[[], None]) -> int:
    """By how many bytes the process's resident set grew at its highest while `work` was done."""
    gc.collect()
    reset_peak_memory("cpu")
    before = memory_allocated("cpu")
    work()
    return max_memory_allocated("cpu") - before


@pytest.mark.slow
def test_saving_copies_one_tensor_at_a_time(tmp_path: Path) -> None:
    turned = {str(i): torch.ones(2048, 2048).t() for i in range(14)}
    # Of the 224 MiB. The C library may keep 64 MiB of what was freed, if `verify` ran in this process before.
    assert memory_growth(lambda: save_model(turned, tmp_path)) < 10 * 16 * MIB
    assert_same(Checkpoint.open(tmp_path), turned)


@pytest.mark.slow
def test_saving_brings_nothing_in_that_lies_on_disk(tmp_path: Path) -> None:
    save_model({f"{i}.weight": torch.full((2048, 2048), float(i)) for i in range(8)}, tmp_path / "old")
    model = on_meta(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))))
    load_checkpoint_in_model(model, tmp_path / "old", {"": "disk"})
    with torch.no_grad():
        model[3].weight[1000, 1000] = 7.5
    assert memory_growth(lambda: save_model(model, tmp_path / "new", max_shard_size="40MB")) < 2 * 16 * MIB
    for i in range(8):
        value = Checkpoint.open(tmp_path / "new").tensor(f"{i}.weight")
        assert value[1000, 1000] == (7.5 if i == 3 else i), "what was changed in memory is saved, too"
        assert value[5, 5] == i


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    save_model(model, tmp_path, max_shard_size="20KB")
    again, report = model_class(name).from_pretrained(tmp_path, output_loading_info=True)
    assert_same(again.state_dict(), model.state_dict())
    assert not any(report.values())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (tmp_path / "generation_config.json").exists() == model.can_generate()


def test_the_config_of_the_model_is_not_changed_by_saving(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    before = model.config.to_dict()
    save_model(model, tmp_path)
    assert model.config.to_dict() == before


def test_tied_weights_are_saved_under_the_name_that_others_are_tied_to(tmp_path: Path) -> None:
    save_model(MODELS["t5"](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert "shared.weight" in checkpoint
    assert not {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"} & set(checkpoint)


def test_shards_are_filled_in_order() -> None:
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcdef", (4, 4, 9, 1, 8, 1), strict=True)
    }
    assert [list(shard) for shard in split_shards(tensors, 8)] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert split_shards({}, 8) == [{}]


def test_nothing_can_be_saved_too(tmp_path: Path) -> None:
    save_model(nn.Module(), tmp_path)
    assert dict(Checkpoint.open(tmp_path)) == {}


def test_tensors_without_values_are_refused_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    save_model(Tied(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"scale and 10 others have no value"):
        save_model(on_meta(Tied()), tmp_path)
    with pytest.raises(CheckpointError, match=r"w has the dtype torch\.complex128"):
        save_model({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(CheckpointError, match="step is a int, not a tensor"):
        save_model({"step": 3}, tmp_path)  # type: ignore[dict-item]
    with pytest.raises(SizeError):
        save_model(Tied(), tmp_path, max_shard_size="many")
    with pytest.raises(CheckpointError, match="must be positive"):
        save_model(Tied(), tmp_path, max_shard_size=0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_no_folder_to_save_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        save_model(Tied(), tmp_path / "file")


def test_a_legacy_save_is_what_torch_loads(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, tmp_path, safe_serialization=False)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_same(loaded, saved_tensors(model))


def test_a_legacy_save_writes_no_more_of_a_storage_than_is_seen(tmp_path: Path) -> None:
    part = torch.zeros(2**20)[:4]
    save_model({"part": part}, tmp_path, safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 4096
    assert same_bits(Checkpoint.open(tmp_path).tensor("part"), part)
