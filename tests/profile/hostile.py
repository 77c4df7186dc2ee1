"""Files that claim to be safetensors and are not, each with what the refusal must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GOOD = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
OTHER = {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]}


def build(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    """A safetensors file with this header (an object, or raw bytes), data, and claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@dataclass(frozen=True)
class HostileFile:
    name: str
    content: Callable[[], bytes]
    refusal: str
    """A regular expression the message must match; the message names the file besides."""

    def __repr__(self) -> str:
        return self.name


def _with(**changes: Any) -> dict[str, Any]:
    return {"w": GOOD["w"] | changes}


def _raw(text: bytes, data: bytes = b"\0" * 16) -> Callable[[], bytes]:
    return lambda: build(text, data)


def _header(header: Any, data: bytes = b"\0" * 16) -> Callable[[], bytes]:
    return lambda: build(header, data)


HOSTILE_FILES = [
    HostileFile("empty", lambda: b"", r"0 bytes long, too short"),
    HostileFile("seven_bytes", lambda: b"\0" * 7, r"7 bytes long, too short"),
    HostileFile("no_header", lambda: build(b"", b"\0" * 16), r"begins with ''"),
    HostileFile("header_beyond_file", lambda: build(GOOD, length=5000), r"5000 bytes long, but the whole file"),
    HostileFile("header_absurd", lambda: build(GOOD, length=10**9), r"1000000000 bytes long, more than"),
    HostileFile("header_length_max", lambda: build(GOOD, length=2**64 - 1), r"more than the format allows"),
    HostileFile("header_cut", lambda: build(GOOD, length=20), r"not JSON"),
    HostileFile("header_runs_into_data", lambda: build(GOOD, length=70), r"not JSON|not UTF-8"),
    HostileFile("pickle", lambda: b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01", r"more than the format allows"),
    HostileFile("zip", lambda: b"PK\x03\x04" + b"\0" * 60, r"begins with|header is"),
    HostileFile("html", lambda: b"<!DOCTYPE html><html>", r"more than the format allows"),
    HostileFile(
        "git_lfs_pointer", lambda: b"version https://git-lfs.github.com/spec/v1\n", r"more than the format allows"
    ),
    HostileFile("not_utf8", _raw(b'{"\xff": {}}'), r"not UTF-8 text"),
    HostileFile("surrogate_name", _raw(json.dumps(GOOD).encode().replace(b"w", b"\\ud800", 1)), r"surrogate"),
    HostileFile("not_json", _raw(b"{nonsense}"), r"not JSON"),
    HostileFile("json_list", _raw(b"[]"), r"begins with '\['"),
    HostileFile("leading_space", _raw(b" " + json.dumps(GOOD).encode()), r"begins with ' '"),
    HostileFile("json_then_more", _raw(json.dumps(GOOD).encode() + b"{}"), r"not JSON"),
    HostileFile("deeply_nested", _raw(b'{"w":' * 50_000), r"not JSON"),
    HostileFile("huge_number", _raw(b'{"w": ' + b"9" * 5000 + b"}"), r"not JSON"),
    HostileFile(
        "duplicate_key",
        _raw(json.dumps(GOOD).encode()[:-1] + b"," + json.dumps(GOOD).encode()[1:]),
        r"the key 'w' twice",
    ),
    HostileFile(
        "duplicate_field",
        _raw(b'{"w":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'),
        r"the key 'dtype' twice",
    ),
    HostileFile("metadata_not_strings", _header({"__metadata__": {"a": 1}} | GOOD), r"__metadata__ is"),
    HostileFile("metadata_list", _header({"__metadata__": []} | GOOD), r"__metadata__ is"),
    HostileFile("entry_is_text", _header({"w": "F32"}), r"tensor 'w' is 'F32'"),
    HostileFile("entry_lacks_shape", _header({"w": {"dtype": "F32", "data_offsets": [0, 16]}}), r"requires dtype"),
    HostileFile("dtype_unknown", _header(_with(dtype="F33")), r"tensor 'w' has the dtype 'F33'"),
    HostileFile("dtype_number", _header(_with(dtype=32)), r"has the dtype 32"),
    HostileFile("dtype_list", _header(_with(dtype=["F32"])), r"has the dtype \['F32'\]"),
    HostileFile("shape_negative", _header(_with(shape=[-2, -2])), r"has the shape \[-2, -2\]"),
    HostileFile("shape_fraction", _header(_with(shape=[2.0, 2.0])), r"has the shape \[2\.0"),
    HostileFile("shape_truth", _header(_with(shape=[True, 4])), r"has the shape \[True"),
    HostileFile("shape_text", _header(_with(shape="22")), r"has the shape '22'"),
    HostileFile("shape_number", _header(_with(shape=4)), r"has the shape 4"),
    HostileFile("shape_overflow", _header(_with(shape=[2**62, 2**62, 4])), r"more elements than"),
    HostileFile("shape_overflow_empty", _header(_with(shape=[0, 2**62, 4], data_offsets=[0, 0]), b""), r"more el"),
    HostileFile("shape_huge_dimension", _header(_with(shape=[0, 2**70], data_offsets=[0, 0]), b""), r"the shape"),
    HostileFile("shape_too_large", _header(_with(shape=[3, 2])), r"24 bytes, but .* hold 16"),
    HostileFile("shape_too_small", _header(_with(shape=[1, 2])), r"8 bytes, but .* hold 16"),
    HostileFile("offsets_negative", _header(_with(data_offsets=[-16, 0])), r"data_offsets \[-16, 0\]"),
    HostileFile("offsets_reversed", _header(_with(data_offsets=[16, 0])), r"out of range"),
    HostileFile("offsets_beyond_file", _header(_with(data_offsets=[16, 32])), r"\[16, 32\] of 16 bytes"),
    HostileFile("offsets_three", _header(_with(data_offsets=[0, 8, 16])), r"requires \[begin, end\]"),
    HostileFile("offsets_fraction", _header(_with(data_offsets=[0, 16.0])), r"data_offsets \[0, 16\.0\]"),
    HostileFile("offsets_null", _header(_with(data_offsets=None)), r"data_offsets None"),
    HostileFile("truncated", _header(GOOD, b"\0" * 15), r"tensor 'w' lies at .* truncated"),
    HostileFile("trailing_bytes", _header(GOOD, b"\0" * 17), r"1 bytes after the last tensor, 'w'"),
    HostileFile(
        "hole", _header(GOOD | {"x": OTHER | {"data_offsets": [17, 21]}}, b"\0" * 21), r"1 bytes before tensor 'x'"
    ),
    HostileFile("hole_at_start", _header(_with(data_offsets=[1, 17]), b"\0" * 17), r"1 bytes before tensor 'w'"),
    HostileFile("overlap", _header(GOOD | {"x": OTHER | {"data_offsets": [12, 16]}}), r"'w' and 'x' overlap"),
    HostileFile("same_bytes_twice", _header(GOOD | {"x": GOOD["w"]}), r"'w' and 'x' overlap"),
    HostileFile("only_data", _header({}, b"\0"), r"1 bytes after the last tensor"),
    HostileFile(
        "four_bit_odd", _header({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"\0" * 3), r"even"
    ),
]
