from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from bigmodel.sources.headers import (
    DTYPES,
    SafetensorsHeader,
    TensorEntry,
    parse_entry,
    parse_header,
    read_header,
    refuse,
)
from tests.profile.hostile import GOOD, HOSTILE_FILES, HostileFile, build


def entry(**changes: Any) -> TensorEntry:
    value = {"dtype": "F16", "shape": [3, 2], "data_offsets": [4, 16]} | changes
    return parse_entry("w", value, data_start=100, data_size=20, source="file")


def test_an_entry_says_where_in_the_file_the_tensor_lies() -> None:
    assert entry() == TensorEntry("w", torch.float16, (3, 2), offset=104, nbytes=12)
    assert entry(shape=[], data_offsets=[18, 20]) == TensorEntry("w", torch.float16, (), 118, 2)
    assert entry(shape=[7, 0], data_offsets=[20, 20]) == TensorEntry("w", torch.float16, (7, 0), 120, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "F128"}, "file: tensor 'w' has the dtype 'F128', which is not one of BOOL, U8"),
        ({"shape": [-1, -6]}, "non-negative integers"),
        ({"shape": [2**40, 2**40]}, "more elements than can be addressed"),
        ({"data_offsets": [10, 22]}, "out of range"),
        ({"data_offsets": [4, 15]}, r"12 bytes, but its data_offsets \[4, 15\] hold 11"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        entry(**changes)


def test_a_refusal_names_the_file_first() -> None:
    with pytest.raises(CheckpointFormatError, match=r"^file: is odd$"):
        refuse("file", "is odd")


def test_no_two_names_mean_one_dtype() -> None:
    assert len(set(DTYPES.values())) == len(DTYPES)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def stored_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("file", HOSTILE_FILES, ids=repr)
def test_a_hostile_file_is_refused_with_its_name_and_the_reason(file: HostileFile, tmp_path: Path) -> None:
    path = tmp_path / f"{file.name}.safetensors"
    path.write_bytes(file.content())
    with pytest.raises(CheckpointFormatError, match=f"^{re.escape(str(path))}: .*(?:{file.refusal})"):
        read_header(path)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_of_the_format_is_known(dtype: torch.dtype) -> None:
    content = save({"w": torch.zeros(3, 2, dtype=dtype)})
    entry = parse_header(content, len(content), "file")["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, (3, 2), 6 * dtype.itemsize)


def test_four_bit_floats_have_the_shape_torch_gives_them() -> None:
    packed = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    content = save({"w": packed})
    entry = parse_header(content, len(content), "file")["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (packed.dtype, (2, 4), 8)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES),
        max_size=6,
    )
)
def test_the_header_says_where_each_tensor_lies(specs: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    tensors = {}
    for name, (dtype, shape) in specs.items():
        raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(shape)
    content = save(tensors, metadata={"format": "pt"})

    header = parse_header(content, len(content), "file")

    assert header.metadata == {"format": "pt"}
    assert set(header) == set(tensors)
    for name, tensor in tensors.items():
        entry = header[name]
        assert (entry.name, entry.dtype, entry.shape) == (name, tensor.dtype, tuple(tensor.shape))
        assert content[entry.offset : entry.offset + entry.nbytes] == stored_bytes(tensor)


@given(st.data())
def test_a_changed_header_is_refused_or_read_as_the_reference_reader_reads_it(data: st.DataObject) -> None:
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int16)}
    content = bytearray(save(tensors, metadata={"format": "pt"}))
    end = 8 + int.from_bytes(content[:8], "little")
    interesting = st.sampled_from(b'0123456789{}[]",:-.eF3 \x00\xff') | st.integers(0, 255)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(interesting)

    try:
        header = parse_header(bytes(content), len(content), "file")
    except CheckpointFormatError:
        return

    reference = load(bytes(content))
    assert set(header) == set(reference)
    for name, tensor in reference.items():
        entry = header[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert bytes(content[entry.offset : entry.offset + entry.nbytes]) == stored_bytes(tensor)


def test_the_reference_reader_refuses_the_hostile_files_too_but_for_these() -> None:
    accepted = set()
    for file in HOSTILE_FILES:
        try:
            load(file.content())
        except (SafetensorError, KeyError, RuntimeError):  # torch refuses what the reader let through
            continue
        accepted.add(file.name)
    assert accepted <= {
        "duplicate_key",  # which of the two counts is anyone's guess
        "duplicate_field",
        "leading_space",  # the format says that a header begins with a brace
    }


def test_an_extra_field_of_an_entry_is_ignored() -> None:
    content = build({"w": GOOD["w"] | {"note": "x"}})
    assert parse_header(content, len(content), "file")["w"].nbytes == 16


def test_a_file_without_tensors_is_sound() -> None:
    content = save({})
    assert dict(parse_header(content, len(content), "file")) == {}


def test_nothing_but_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    size = 2**40
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert read_header(path)["w"].nbytes == size


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"none\.safetensors: there is no such file"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointFormatError, match="is a folder"):
        read_header(tmp_path)


def test_a_header_is_a_mapping_that_says_what_it_is(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    header = read_header(tmp_path / "w.safetensors")
    assert isinstance(header, SafetensorsHeader)
    assert "1 tensors" in repr(header)
    assert list(header) == ["w"]
    assert header.file_size == (tmp_path / "w.safetensors").stat().st_size
