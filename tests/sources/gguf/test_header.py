"""Headers of GGUF files are read, and refused in one clear line where they are wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from bigmodel.sources.gguf.header import Strings, read_gguf_header
from tests.quantized.gguf_files import Stored, write_gguf

TENSORS = {
    "a": Stored("F32", (3, 5), bytes(60)),
    "b": Stored("Q4_0", (2, 64), bytes(72)),
    "c": Stored("F16", (7,), bytes(14)),
}
METADATA = {"general.architecture": "llama", "n": 7, "x": 1.5, "on": True, "list": [1, 2], "words": ["a", "", "bc"]}


def file(folder: Path, alignment: int = 32) -> Path:
    path = folder / "m.gguf"
    more = {} if alignment == 32 else {"general.alignment": alignment}
    write_gguf(path, {**METADATA, **more}, TENSORS, alignment)
    return path


@pytest.mark.parametrize("alignment", [32, 128])
def test_metadata_and_places_of_tensors_are_read(tmp_path: Path, alignment: int) -> None:
    header = read_gguf_header(file(tmp_path, alignment))
    assert {key: header.metadata[key] for key in METADATA} == {**METADATA, "words": Strings(3)}
    a, b, c = (header.tensors[name] for name in "abc")
    assert (a.dtype, a.shape, a.stored_shape, a.nbytes) == (torch.float32, (3, 5), (3, 5), 60)
    assert (b.dtype, b.shape, b.stored_shape, b.nbytes) == (torch.uint8, (2, 64), (2, 36), 72)
    assert all(each.offset % alignment == 0 for each in (a, b, c))
    assert a.offset < b.offset < c.offset < header.file_size


def patched(folder: Path, old: bytes, new: bytes) -> Path:
    path = file(folder)
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def name(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


INFO_A = name("a") + struct.pack("<IQQIQ", 2, 5, 3, 0, 0)
HEAD = b"GGUF" + struct.pack("<IQQ", 3, 3, 6)
LONG = 2**62


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", "does not begin with GGUF"),
        (HEAD, b"GGUF" + struct.pack("<IQQ", 1, 3, 6), "is of version 1"),
        (HEAD, b"GGUF" + struct.pack(">I", 3) + HEAD[8:], "big-endian"),
        (HEAD, b"GGUF" + struct.pack("<IQQ", 3, LONG, 6), f"says that it has {LONG} tensors, more than its"),
        (HEAD, b"GGUF" + struct.pack("<IQQ", 3, 3, LONG), f"says that it has {LONG} metadata, more than its"),
        (name("on"), struct.pack("<Q", LONG) + b"on", "the name of a metadata item ends"),
        (name("on"), struct.pack("<Q", 2) + b"\xff\xff", "is not UTF-8 text"),
        (name("n"), name("x"), "its metadata 'x?n?' ?names|names 'x' twice"),
        (name("n") + b"\x04", name("n") + b"\x63", "'n' is of the type 99"),
        (struct.pack("<IIQ", 9, 4, 2), struct.pack("<IIQ", 9, 4, LONG), f"{LONG} numbers, ends"),
        (struct.pack("<IIQ", 9, 8, 3), struct.pack("<IIQ", 9, 8, LONG), f"{LONG} strings, ends"),
        (struct.pack("<IIQ", 9, 8, 3), struct.pack("<IIQ", 9, 9, 3), "is an array of the type 9"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 9, 5, 3, 0, 0), "'a' has 9 dimensions"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 0, 0, 0), r"'a' has the shape \(0, 5\)"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, LONG, LONG, 0, 0), "not of 1 to"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 11, 0), "'a' is stored as Q3_K, which is not supported"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 777, 0), "'a' is stored as number 777"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 2, 0), "Q4_0 with rows of 5, no multiple of 32"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 0, 4), "offset 4, no multiple of the alignment 32"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 0, 64), "'a' and 'b' overlap|'b' and 'a' overlap"),
        (INFO_A, name("a") + struct.pack("<IQQIQ", 2, 5, 3, 0, LONG), "end beyond the file"),
        (INFO_A, name("b") + struct.pack("<IQQIQ", 2, 5, 3, 0, 0), "names the tensor 'b' twice"),
    ],
)
def test_a_damaged_or_hostile_header_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        read_gguf_header(patched(tmp_path, old, new))
    assert str(refused.value).startswith(f"{tmp_path / 'm.gguf'}: ")


@pytest.mark.parametrize("alignment", [0, 1, 24, 2**30])
def test_an_alignment_that_is_none_is_refused(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {**METADATA, "general.alignment": alignment}, TENSORS)
    with pytest.raises(CheckpointFormatError, match=f"general.alignment is {alignment}, not a power of two"):
        read_gguf_header(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no such file"):
        read_gguf_header(tmp_path / "m.gguf")
    with pytest.raises(CheckpointFormatError, match="is a folder"):
        read_gguf_header(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointFormatError, match="0 bytes long, too short"):
        read_gguf_header(tmp_path / "empty.gguf")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = file(tmp_path_factory.mktemp("hostile"))
    return path, path.read_bytes()


@given(length=st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_truncated_file_is_refused(content: tuple[Path, bytes], length: int) -> None:
    path, whole = content
    path.write_bytes(whole[: length % (len(whole) - 32)])
    with pytest.raises(CheckpointFormatError):
        read_gguf_header(path)


@pytest.mark.slow
@given(place=st.integers(0, 10**6), octet=st.integers(0, 255))
@settings(max_examples=200)
def test_any_other_byte_gives_a_header_or_a_refusal(content: tuple[Path, bytes], place: int, octet: int) -> None:
    path, whole = content
    place %= len(whole)
    path.write_bytes(whole[:place] + bytes([octet]) + whole[place + 1 :])
    try:
        header = read_gguf_header(path)
    except CheckpointError:
        return
    assert all(t.offset > 0 and t.offset + t.nbytes <= len(whole) for t in header.tensors.values())
