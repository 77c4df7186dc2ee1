"""The tensors of a large mixture from its headers, with one expert of each layer standing for all.

Checkpoints that store experts one by one have up to 200,000 entries in their headers. Parsing and checking each takes
seconds; a plan only needs their bytes. So only the entries of experts number 0 are parsed. That the others are as many
and as large is known from the number of entries and from the sizes of the files. Where these do not agree, or anything
is unusual, there is no sample, and all entries are parsed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .headers import LENGTH_BYTES, TensorEntry, header_length, parse_entry

_NUMBERED, _FIRST = b".experts.", b".experts.0."


@dataclass(frozen=True)
class SampledHeaders:
    """Entries of a checkpoint.

    Attributes:
        entries: the tensors by key, of the experts of each layer only those of number 0.
        experts: how many experts each of these stands for.
    """

    entries: dict[str, TensorEntry]
    experts: int


def sample_headers(paths: Iterable[Path]) -> SampledHeaders | None:
    """Return the tensors of the safetensors files at `paths`; None if not all experts are like those of number 0."""
    entries: dict[str, TensorEntry] = {}
    count = data_bytes = 0
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(LENGTH_BYTES)
            try:
                raw = file.read(header_length(start, size, str(path)))
                found = _parsed(raw, size - LENGTH_BYTES - len(raw), str(path))
            except (CheckpointError, ValueError, RecursionError):
                return None
        data_bytes += size - LENGTH_BYTES - len(raw)
        count += found[0]
        if entries.keys() & found[1].keys():
            return None
        entries.update(found[1])
    return _checked(entries, count, data_bytes)


def _parsed(raw: bytes, data_size: int, source: str) -> tuple[int, dict[str, TensorEntry]]:
    """Return the number of entries of a header, and those that are kept."""
    if not raw.startswith(b"{"):
        raise ValueError("no object")
    pieces, wanted = _wanted_pieces(raw[1:])
    kept = [piece.lstrip(b", \n") for piece in wanted if len(piece) > 1 and not piece.isspace()]
    count = pieces - len(wanted) + len(kept)
    items: dict[str, Any] = json.loads(b"{" + b",".join(piece + b"}" for piece in kept) + b"}")
    if len(items) != len(kept):
        raise ValueError("keys are named twice")
    described = items.pop("__metadata__", None) is not None
    return count - described, {name: parse_entry(name, value, 0, data_size, source) for name, value in items.items()}


def _wanted_pieces(raw: bytes) -> tuple[int, list[bytes]]:
    """Return how many pieces `raw` has between closing braces, and those of them that name no expert, or number 0.

    Tens of millions of bytes are searched, so that is left to NumPy.
    """
    data = np.frombuffer(raw, np.uint8)
    ends = np.append(np.flatnonzero(data == ord("}")), len(data))
    numbered, first = np.zeros(len(ends), bool), np.zeros(len(ends), bool)
    numbered[np.searchsorted(ends, _positions(data, _NUMBERED))] = True
    first[np.searchsorted(ends, _positions(data, _FIRST))] = True
    starts = np.append(0, ends[:-1] + 1)
    wanted = np.flatnonzero(~numbered | first)
    return len(ends), [
        raw[start:end] for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True)
    ]


def _positions(data: NDArray[np.uint8], wanted: bytes) -> NDArray[np.intp]:
    """Return the positions of a sequence of bytes in others."""
    found = np.flatnonzero((data[:-1] == wanted[0]) & (data[1:] == wanted[1]))
    found = found[found <= len(data) - len(wanted)]
    for place, byte in enumerate(wanted[2:], 2):
        found = found[data[found + place] == byte]
    return found


def _checked(entries: dict[str, TensorEntry], count: int, data_bytes: int) -> SampledHeaders | None:
    """Return the sample if the entries of experts, counted several times, make up the number and the bytes of all."""
    marker = _FIRST.decode()
    first = [entry for name, entry in entries.items() if marker in name]
    if not first:
        return None
    experts, rest = divmod(count - (len(entries) - len(first)), len(first))
    of_experts = sum(entry.nbytes for entry in first)
    others = sum(entry.nbytes for entry in entries.values()) - of_experts
    if rest or experts < 2 or others + experts * of_experts != data_bytes:
        return None
    return SampledHeaders(entries, experts)
