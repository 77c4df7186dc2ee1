from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel import from_pretrained
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from bigmodel.sources.resolve import LocalSource, open_source

from ..profile.sources import weight_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, a config, and an index that names them."""
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int8)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


def test_a_folder_gives_config_headers_map_and_bytes(folder: Path) -> None:
    source = open_source(folder)
    assert source.config_dict() == {"model_type": "gpt2"}
    assert {file: set(header) for file, header in source.headers().items()} == {
        "one.safetensors": {"a", "b"},
        "two.safetensors": {"c"},
    }
    assert source.weight_map() == {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    assert weight_bytes(source) == 12 + 2 + 10
    assert source.fetch_weights() == folder
    assert source.name == str(folder)


@pytest.mark.parametrize("name", ["one.safetensors", "model.safetensors.index.json"])
def test_a_file_of_a_checkpoint_can_be_named_itself(folder: Path, name: str) -> None:
    source = open_source(str(folder / name))
    assert source.config_dict() == {"model_type": "gpt2"}
    assert weight_bytes(source) == (14 if name == "one.safetensors" else 24)
    assert source.fetch_weights() == folder / name


def test_headers_are_read_once(folder: Path) -> None:
    source = open_source(folder)
    first = source.headers()
    (folder / "two.safetensors").unlink()
    assert source.headers() is first


def test_links_to_blobs_are_followed_as_the_cache_makes_them(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("one.safetensors", "two.safetensors", "model.safetensors.index.json", "config.json"):
        (snapshot / name).symlink_to(Path("../..") / name)
    assert weight_bytes(open_source(snapshot)) == 24


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert isinstance(open_source(f"~/{folder.name}"), LocalSource)


def test_an_index_that_names_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json: names the file 'two\.safetensors', which is not"):
        open_source(folder).headers()


def test_an_index_that_contradicts_its_shards_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"c": "one.safetensors"}}')
    with pytest.raises(CheckpointFormatError, match=r"'c' is in one\.safetensors, which holds no such tensor"):
        open_source(folder).weight_map()


def test_legacy_weights_have_no_readable_header(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model\.bin: is not safetensors"):
        open_source(tmp_path).headers()


def test_a_missing_or_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointFormatError, match=r"config\.json: holds a list"):
        open_source(folder).config_dict()
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointFormatError, match=r"config\.json: is not JSON"):
        open_source(folder).config_dict()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json"):
        open_source(folder).config_dict()


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "a/b/c", "~/none-such", "..", "none\\such"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    if name == "..":
        assert isinstance(open_source(name), LocalSource)
        return
    with pytest.raises(CheckpointNotFoundError, match="there is no such folder or file"):
        open_source(name)


@pytest.mark.slow
def test_hundreds_of_shards_of_a_huge_checkpoint_are_read_by_their_headers(tmp_path: Path) -> None:
    size = 2**31
    weight_map = {}
    for shard in range(200):
        file = f"model-{shard:05}.safetensors"
        entries = {
            f"layers.{shard}.experts.{i}.weight": {
                "dtype": "BF16",
                "shape": [size // 128, 1],
                "data_offsets": [i * size // 64, (i + 1) * size // 64],
            }
            for i in range(64)
        }
        header = json.dumps(entries).encode()
        with (tmp_path / file).open("wb") as handle:
            handle.write(len(header).to_bytes(8, "little") + header)
            handle.truncate(8 + len(header) + size)
        weight_map |= dict.fromkeys(entries, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    source = open_source(tmp_path)

    assert weight_bytes(source) == 200 * size  # 429 GB
    assert len(source.weight_map()) == 200 * 64


@pytest.mark.parametrize("name", [None, 3, b"folder", ["folder"], "a\0b"])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither a path nor"):
        open_source(name)  # type: ignore[arg-type]


def test_a_pipeline_of_several_models_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "SomePipeline", "vae": ["diffusers", "AutoencoderKL"], "unet": ["diffusers", "UNet2DModel"]}'
    )
    for name in ("vae", "unet"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointFormatError, match=r"is a pipeline of several models \(unet, vae\): load it with"):
        open_source(tmp_path).config_dict()
    with pytest.raises(CheckpointFormatError, match="is a pipeline of several models"):
        from_pretrained(tmp_path)
