from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bigmodel.checkpoint import Checkpoint, load_state_dict, mapped_region
from bigmodel.checkpoint.checkpoint import SafetensorsShard
from bigmodel.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError, DeviceMapError
from bigmodel.sources.headers import read_header
from tests.checkpoint.helpers import assert_same, descriptors_of, maps_of, same_bits, save_sharded, state_dicts
from tests.checkpoint.hostile import HOSTILE_FOLDERS, HostileFolder
from tests.profile.hostile import HOSTILE_FILES, HostileFile

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(3), "b": torch.arange(4)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_sharded(tmp_path / "sharded", TENSORS, shards=2)


def test_a_sharded_checkpoint_is_a_mapping_of_its_tensors(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert_same(checkpoint, TENSORS)
    assert len(checkpoint) == 3
    assert "a.bias" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.file("a.bias") == "model-00002-of-00002.safetensors"
    assert checkpoint.entry("a.weight").shape == (2, 3)
    assert checkpoint.total_bytes() == 24 + 12 + 32
    assert "3 tensors in 2 files" in repr(checkpoint)


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_a_folder_an_index_or_a_file_can_be_opened(sharded: Path, name: str) -> None:
    checkpoint = Checkpoint.open(sharded / name)
    expected = {key: TENSORS[key] for key in checkpoint}
    assert_same(checkpoint, expected)
    assert set(expected) == ({"a.weight", "b"} if name.startswith("model-") else set(TENSORS))


def test_opening_reads_no_weight_and_maps_nothing(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert (maps_of(sharded), descriptors_of(sharded)) == (0, 0)
    tensors = [checkpoint.tensor(key) for key in checkpoint]
    assert (maps_of(sharded), descriptors_of(sharded)) == (2, 0)
    del checkpoint
    tensors.pop(0)
    assert maps_of(sharded) == 2
    tensors.clear()
    assert maps_of(sharded) == 0


def test_a_tensor_knows_where_it_lies(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    for key in checkpoint:
        region = mapped_region(checkpoint.tensor(key))
        assert region is not None
        raw = region.path.read_bytes()[region.offset : region.offset + region.nbytes]
        assert raw == bytes(TENSORS[key].reshape(-1).view(torch.uint8).tolist())
        assert region.offset == checkpoint.entry(key).offset
        assert checkpoint.is_mappable(key)


def test_tensors_in_memory_have_no_place_on_disk(sharded: Path) -> None:
    tensor = Checkpoint.open(sharded).tensor("b", resident=True)
    assert mapped_region(tensor) is None
    assert same_bits(tensor, TENSORS["b"])


def test_a_key_the_checkpoint_lacks_is_named(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointMismatchError, match="holds no tensor 'c'"):
        checkpoint.tensor("c")
    with pytest.raises(KeyError):
        checkpoint["c"]


def test_a_file_that_changed_length_since_is_refused(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    with (sharded / checkpoint.file("b")).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointFormatError, match="open the checkpoint again"):
        checkpoint.tensor("b")


def test_links_of_the_hub_s_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    assert_same(Checkpoint.open(snapshot), TENSORS)


def test_shards_may_lie_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file(TENSORS, tmp_path / "weights" / "all.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, "weights/all.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(Checkpoint.open(tmp_path), TENSORS)


@pytest.mark.parametrize("folder", HOSTILE_FOLDERS, ids=repr)
def test_a_hostile_folder_is_refused_with_its_name_and_the_reason(
    folder: HostileFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "folder"
    path.mkdir()
    folder.build(path)
    with pytest.raises(folder.error, match=f"^{re.escape(str(path))}.*{folder.refusal}") as refused:
        dict(Checkpoint.open(path))
    assert str(refused.value).isprintable()
    assert not (tmp_path / "pwned").exists()
    assert (maps_of(path), descriptors_of(path)) == (0, 0)


@pytest.mark.parametrize("file", HOSTILE_FILES, ids=repr)
def test_a_hostile_file_is_refused(file: HostileFile, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file.content())
    with pytest.raises(CheckpointFormatError, match=file.refusal):
        Checkpoint.open(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="none: there is no such folder or file"):
        Checkpoint.open(tmp_path / "none")


@pytest.mark.slow
@given(state_dicts(), st.integers(1, 3))
def test_the_tensors_are_those_of_the_reference_reader(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], shards: int
) -> None:
    folder = save_sharded(tmp_path_factory.mktemp("any"), tensors, shards)
    expected = {}
    for file in folder.glob("*.safetensors"):
        expected |= load_file(file)
    assert_same(Checkpoint.open(folder), expected)


@given(st.data())
def test_a_damaged_file_loads_as_the_reference_reader_reads_it_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from(b'0123456789{}[]",: \x00F'))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1]))]))
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointFormatError:
        return
    assert_same(checkpoint, load_file(path))


def test_a_state_dict_goes_where_its_map_says(sharded: Path, accelerators: None) -> None:
    assert_same(load_state_dict(sharded), TENSORS)
    placed = load_state_dict(sharded, {"a": "virtual:1", "b": "disk"})
    assert [str(placed[key].device) for key in TENSORS] == ["virtual:1", "virtual:1", "cpu"]
    assert_same(placed, TENSORS)
    with pytest.raises(DeviceMapError, match="no device for b"):
        load_state_dict(sharded, {"a": "cpu"})


def test_a_shard_maps_its_file_once_for_the_disk_and_once_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    tensors = {name: torch.rand(5) for name in "abc"}
    save_file(tensors, path)
    shard = SafetensorsShard(path, read_header(path))
    assert maps_of(path) == 0
    kept = [shard.tensor(name) for name in shard.keys()]  # noqa: SIM118 - a shard is no mapping
    assert maps_of(path) == 1
    kept += [shard.tensor(name, resident=True) for name in "abc"]
    assert maps_of(path) == 2
    assert all(same_bits(shard.tensor(name), tensors[name]) for name in tensors)
    assert shard.entry("b").shape == (5,)
