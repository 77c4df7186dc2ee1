"""The files of a checkpoint, and its index: which file holds which tensor.

JSON with duplicate keys is refused, since readers differ in which of the two values they take.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import CheckpointFormatError, CheckpointNotFoundError
from .special_files import refuse_special_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LEGACY_SINGLE_FILE = "pytorch_model.bin"
LEGACY_INDEX_FILE = "pytorch_model.bin.index.json"

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")

_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-(?!00001\.)\d{5}\.(safetensors|bin)$")
_FURTHER_GGUF = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|^mmproj.*\.gguf$")
"""A GGUF file that is no model's first: the second or a later one of a split model, or a model's vision part."""


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the ``weight_map`` of the index file at `path`: tensor name -> file name inside the index's folder.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointFormatError: it is not an index, or names a file outside its folder.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file") from error
    return parse_index(content, str(path))


def parse_index(content: bytes, source: str) -> dict[str, str]:
    """Parse the content of an index as `read_index` does; `source` names it in messages."""
    try:
        index: Any = _parse_json(content)
    except DuplicateKeyError as error:
        raise CheckpointFormatError(
            f"{source}: names {error.key!r} twice; write the index again, each tensor in one file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{source}: is not JSON ({error}); copy or download the file again") from error
    weight_map = index.get("weight_map", index if _is_bare(index) else None) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointFormatError(
            f"{source}: holds no 'weight_map' of tensor names to file names: this is not a checkpoint's index"
        )
    try:
        for name in set(weight_map.values()):  # an index may have hundreds of thousands of keys, and few files
            check_file_name(name, "", source)
    except (TypeError, CheckpointFormatError):
        for key, name in weight_map.items():  # the message says which
            check_file_name(name, key, source)
    return weight_map


def _parse_json(content: bytes) -> Any:
    """Return the value of a JSON text.

    A fast parser, which keeps the last of duplicate keys, is right where the text has as many colons as its objects
    have members: then each colon belongs to a member that was kept. An index may have hundreds of thousands.

    Raises:
        DuplicateKeyError: an object names a key twice.
        ValueError: it is not JSON.
    """
    from pydantic_core import from_json  # not before: few programs read an index

    try:
        found = from_json(content, allow_inf_nan=False)
        if _members(found) == content.count(b":"):
            return found
    except ValueError:
        pass  # the other parser says what is wrong
    return json.loads(content.decode("utf-8"), object_pairs_hook=once_each)


def _members(value: Any) -> int:
    """Return the members of the objects in an index: of itself, and of its members that are objects of plain values."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(member) for member in value.values() if isinstance(member, dict))


def _is_bare(index: Mapping[str, Any]) -> bool:
    """Whether an index is a map of tensor names to files itself, as older programs have written it."""
    return bool(index) and all(isinstance(name, str) and name.endswith(_SUFFIXES) for name in index.values())


def check_file_name(name: object, key: str, source: str) -> None:
    """Refuse a file name that leads out of the index's folder.

    Only the name is checked, not the target of a link: the Hub's cache consists of links.

    Raises:
        CheckpointFormatError: names the index, the key and the file name.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointFormatError(f"{source}: places {key!r} in the file {name!r}, which is no file name")
    windows = PureWindowsPath(name)
    absolute = PurePosixPath(name).is_absolute() or bool(windows.drive or windows.root)
    if absolute or ".." in windows.parts:
        raise CheckpointFormatError(
            f"{source}: says that {key!r} is in the file {name!r}, outside the checkpoint's folder; "
            "an index may only name files beside itself: do not trust this checkpoint, or mend its index"
        )


def merge_weight_map(
    headers: Mapping[str, Collection[str]], index: dict[str, str] | None, source: str
) -> dict[str, str]:
    """Return the file of each tensor by name, from the headers, validated against the index if there is one.

    Tensors of a shard that the index does not name are included, as in transformers.

    Raises:
        CheckpointFormatError: the index places a tensor in a shard that does not hold it, or two shards hold
            a tensor that the index does not place.
    """
    weight_map = dict(index or {})
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointFormatError(
                f"{source}: says that {name!r} is in {file}, which holds no such tensor: "
                "the index and the shards are from different checkpoints; download or save it again"
            )
    for file, header in headers.items():
        for name in header:
            if weight_map.setdefault(name, file) != file and (index is None or name not in index):
                raise CheckpointFormatError(
                    f"{source}: {name!r} is in {weight_map[name]} and in {file}; add an index that names one of them"
                )
    return weight_map


def find_checkpoint_file(path: Path) -> Path:
    """Return the file by which a checkpoint is opened: an index, or the one file that holds all tensors.

    In a folder, the first of: ``model.safetensors``, its index, the only ``*.safetensors.index.json``, the only
    ``*.safetensors``, ``pytorch_model.bin``, its index, the only ``*.index.json``, the only ``*.bin``. transformers
    uses the same order.
    Then the only ``*.gguf``, or the first of a split one, whose header names the others.
    One of several shards (``...-00001-of-00003.safetensors``) is never taken for the whole checkpoint.

    Raises:
        CheckpointNotFoundError: `path` does not exist, or the folder holds no checkpoint.
        CheckpointFormatError: several files qualify, the file's suffix is not that of a checkpoint, or what lies there
            under the name of a file is none.
    """
    refuse_special_files(path)
    if path.is_file():
        if not path.name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")):
            raise CheckpointFormatError(
                f"{path}: is neither .safetensors, .bin, .gguf nor .index.json; name one of those or their folder"
            )
        return path
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path}: there is no such folder or file")
    names = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
    return path / choose_checkpoint_file(names, str(path))


def choose_checkpoint_file(names: Iterable[str], source: str) -> str:
    """Apply the order of `find_checkpoint_file` to file names; `source` is the name of their folder or repository."""
    rules: tuple[tuple[str, str], ...] = (
        (SINGLE_FILE, ""),
        (INDEX_FILE, ""),
        ("", ".safetensors.index.json"),
        ("", ".safetensors"),
        (LEGACY_SINGLE_FILE, ""),
        (LEGACY_INDEX_FILE, ""),
        ("", ".index.json"),
        ("", ".bin"),
        ("", ".gguf"),
    )
    candidates = sorted(name for name in names if not _FURTHER_GGUF.search(name))
    stray: list[str] = []
    for whole, suffix in rules:
        found = [name for name in candidates if name == whole or (suffix and name.endswith(suffix))]
        complete = [name for name in found if not _ONE_OF_SEVERAL.search(name)]
        if len(complete) == 1:
            return complete[0]
        stray += found
        if complete:
            break
    if stray:
        raise CheckpointFormatError(
            f"{source}: holds {', '.join(stray[:5])}{', ...' if len(stray) > 5 else ''} and no "
            f"{INDEX_FILE} that lists the shards of one checkpoint; name one of the files, or restore the index"
        )
    raise CheckpointNotFoundError(
        f"{source}: holds no checkpoint: no *.safetensors, no {INDEX_FILE}, no pytorch_model.bin and no *.gguf"
    )


class DuplicateKeyError(Exception):
    """A JSON object contains ``key`` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dictionary: an ``object_pairs_hook`` for `json.loads`.

    Raises:
        DuplicateKeyError: a key occurs twice.
    """
    items = dict(pairs)
    if len(items) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return items
