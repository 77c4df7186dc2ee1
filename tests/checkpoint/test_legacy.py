from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.checkpoint import Checkpoint, mapped_region
from bigmodel.checkpoint.legacy import NOT_IN_PLACE, LegacyShard
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from tests.checkpoint.helpers import assert_same, maps_of, same_bits, state_dicts

SQUARE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.slow
@given(state_dicts())
def test_a_file_of_torch_save_is_used_in_place(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("legacy") / "pytorch_model.bin"
    torch.save(tensors, path)
    checkpoint = Checkpoint.open(path)
    assert_same(checkpoint, torch.load(path, weights_only=True))
    for name, tensor in tensors.items():
        region = mapped_region(checkpoint.tensor(name))
        if tensor.numel():
            assert region is not None
            assert region.offset == checkpoint.entry(name).offset
        assert checkpoint.entry(name).nbytes == tensor.nbytes


def test_opening_maps_nothing_and_tensors_share_one_map(tmp_path: Path) -> None:
    torch.save({"a": SQUARE, "b": SQUARE + 1}, tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    assert maps_of(tmp_path) == 0
    tensors = [checkpoint.tensor("a"), checkpoint.tensor("b")]
    assert maps_of(tmp_path) == 1
    tensors[0].zero_()
    assert_same(Checkpoint.open(tmp_path), {"a": SQUARE, "b": SQUARE + 1})


def test_sharded_files_are_put_together_by_their_index(tmp_path: Path) -> None:
    torch.save({"a": SQUARE}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": SQUARE + 1}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(Checkpoint.open(tmp_path), {"a": SQUARE, "b": SQUARE + 1})


def test_views_and_tied_tensors_of_one_storage_keep_their_values(tmp_path: Path) -> None:
    tensors = {"whole": SQUARE, "tied": SQUARE, "rows": SQUARE[1:], "columns": SQUARE[:, 1:], "turned": SQUARE.t()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    assert_same(checkpoint, tensors)
    assert checkpoint.entry("rows").offset == checkpoint.entry("whole").offset + 16
    assert checkpoint.entry("tied").offset == checkpoint.entry("whole").offset
    assert [name for name in tensors if not checkpoint.is_mappable(name)] == ["columns", "turned"]
    assert checkpoint.tensor("turned").is_contiguous()


def test_parameters_are_plain_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Parameter(SQUARE)}, tmp_path / "pytorch_model.bin")
    tensor = Checkpoint.open(tmp_path).tensor("a")
    assert type(tensor) is torch.Tensor
    assert not tensor.requires_grad


def test_the_format_before_zip_is_read_as_a_whole(tmp_path: Path) -> None:
    torch.save({"a": SQUARE}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entry("a").offset == NOT_IN_PLACE
    assert same_bits(checkpoint.tensor("a"), SQUARE)
    assert not checkpoint.is_mappable("a")


def rewritten(path: Path, **changes: bytes | int) -> Path:
    """The archive at `path` with its storages compressed, or its byte order renamed."""
    other = path.with_suffix(".pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("/byteorder"):
                content = bytes(changes.get("byteorder", content))
            kind = int(changes.get("compress", 0)) if "/data/" in info.filename else zipfile.ZIP_STORED
            new.writestr(info.filename, content, compress_type=kind)
    return other


def test_a_compressed_archive_is_read_by_torch(tmp_path: Path) -> None:
    torch.save({"a": SQUARE}, tmp_path / "whole.bin")
    checkpoint = Checkpoint.open(rewritten(tmp_path / "whole.bin", compress=zipfile.ZIP_DEFLATED))
    assert not checkpoint.is_mappable("a")
    assert same_bits(checkpoint.tensor("a"), SQUARE)


def test_the_other_byte_order_is_turned_by_torch(tmp_path: Path) -> None:
    torch.save({"a": SQUARE}, tmp_path / "whole.bin")
    foreign = b"big" if sys.byteorder == "little" else b"little"
    checkpoint = Checkpoint.open(rewritten(tmp_path / "whole.bin", byteorder=foreign))
    assert not checkpoint.is_mappable("a")
    assert same_bits(checkpoint.tensor("a"), torch.load(checkpoint.path, weights_only=True)["a"])


def test_an_archive_written_by_another_tool_is_used_in_place(tmp_path: Path) -> None:
    torch.save({"a": SQUARE}, tmp_path / "whole.bin")
    checkpoint = Checkpoint.open(rewritten(tmp_path / "whole.bin"))
    assert same_bits(checkpoint.tensor("a"), SQUARE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"none\.bin: there is no such file"):
        LegacyShard(tmp_path / "none.bin")


@given(st.data())
def test_a_damaged_file_is_refused_or_shows_the_bytes_it_holds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "pytorch_model.bin"
    torch.save({"a": SQUARE, "b": torch.ones(5, dtype=torch.int8)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        tensors = dict(Checkpoint.open(path))
    except CheckpointFormatError:
        return
    for tensor in tensors.values():
        region = mapped_region(tensor)
        if region is not None:
            raw = content[region.offset : region.offset + region.nbytes]
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == raw
