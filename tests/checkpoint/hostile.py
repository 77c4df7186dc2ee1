"""Folders that claim to be checkpoints and are not, each with what the refusal must be and say."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HostileFolder:
    """A folder made by `build`, refused with `error` and a message that matches `refusal`."""

    name: str
    build: Callable[[Path], None]
    error: type[CheckpointError]
    refusal: str

    def __repr__(self) -> str:
        return self.name


def _index(folder: Path, weight_map: object, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def _shard(folder: Path, name: str, *keys: str) -> None:
    save_file({key: torch.zeros(2) for key in keys}, folder / name)


def _missing_shard(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def _outside(folder: Path) -> None:
    _shard(folder.parent, "outside.safetensors", "a")
    _index(folder, {"a": "../outside.safetensors"})


def _absolute(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _index(folder, {"a": str(folder / "one.safetensors")})


def _wrong_shard(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _shard(folder, "two.safetensors", "b")
    _index(folder, {"a": "two.safetensors", "b": "two.safetensors"})


def _truncated_shard(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _shard(folder, "two.safetensors", "b")
    os.truncate(folder / "two.safetensors", (folder / "two.safetensors").stat().st_size - 1)
    _index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def _ambiguous(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a", "b")
    _shard(folder, "two.safetensors", "b", "c")
    _index(folder, {"a": "one.safetensors", "c": "two.safetensors"})


def _shard_is_folder(folder: Path) -> None:
    (folder / "one.safetensors").mkdir()
    _index(folder, {"a": "one.safetensors"})


def _dangling_link(folder: Path) -> None:
    (folder / "one.safetensors").symlink_to(folder / "none")
    _index(folder, {"a": "one.safetensors"})


def _two_files(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _shard(folder, "two.safetensors", "b")


def _one_of_three(folder: Path) -> None:
    _shard(folder, "model-00001-of-00003.safetensors", "a")


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def _pickle_with_code(folder: Path) -> None:
    torch.save({"a": torch.zeros(2), "evil": _Attack()}, folder / "pytorch_model.bin")


def _raw_pickle_with_code(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"evil": _Attack()}))


def _not_a_zip(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\0" * 1000)


def _truncated_zip(folder: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, folder / "pytorch_model.bin")
    os.truncate(folder / "pytorch_model.bin", 2000)


def _empty_bin(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()


def _training_state(folder: Path) -> None:
    torch.save({"model": {"a": torch.zeros(2)}, "step": 3}, folder / "pytorch_model.bin")


def _list_of_tensors(folder: Path) -> None:
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")


def _sparse_bin(folder: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, folder / "pytorch_model.bin")


def _zip_without_storage(folder: Path) -> None:
    whole = folder / "whole.zip"
    torch.save({"a": torch.zeros(100)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        for info in old.infolist():
            if "/data/" not in info.filename:
                new.writestr(info.filename, old.read(info))
    whole.unlink()


def _zip_with_short_storage(folder: Path) -> None:
    whole = folder / "whole.zip"
    torch.save({"a": torch.zeros(100)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, content[:8] if "/data/" in info.filename else content)
    whole.unlink()


def _bin_index_missing(folder: Path) -> None:
    _index(folder, {"a": "pytorch_model-00001-of-00001.bin"}, "pytorch_model.bin.index.json")


def _duplicate_key(folder: Path) -> None:
    _shard(folder, "one.safetensors", "a")
    _shard(folder, "two.safetensors", "a")
    (folder / INDEX).write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')


def _index_not_utf8(folder: Path) -> None:
    (folder / INDEX).write_bytes(b'{"weight_map": {"a": "\xff.safetensors"}}')


def _infinite_name(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": Infinity}}')


def _endless_name(folder: Path) -> None:
    _index(folder, {"a": "x" * 5000 + ".safetensors"})


def _name_that_moves_the_cursor(folder: Path) -> None:
    _index(folder, {"a": "\x1b[31mred\n.safetensors"})


def _name_that_is_no_text(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "\\udce9.safetensors"}}')


def _config_as_weights(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    _index(folder, {"a": "config.json"})


def _index_as_weights(folder: Path) -> None:
    _index(folder, {"a": INDEX})


def _index_is_folder(folder: Path) -> None:
    (folder / INDEX).mkdir()


def _link_to_itself(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def _nothing(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _index_is_text(folder: Path) -> None:
    (folder / INDEX).write_text("see the other folder")


def _index_of_lists(folder: Path) -> None:
    _index(folder, ["a"])


def _index_empty(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}}')


HOSTILE_FOLDERS = [
    HostileFolder("no_checkpoint", _nothing, CheckpointNotFoundError, r"holds no checkpoint"),
    HostileFolder("missing_shard", _missing_shard, CheckpointNotFoundError, r"names the file 'two\.safetensors"),
    HostileFolder("outside_folder", _outside, CheckpointFormatError, r"'a' is in the file '\.\./outside"),
    HostileFolder("absolute_name", _absolute, CheckpointFormatError, r"outside the checkpoint's folder"),
    HostileFolder("wrong_shard", _wrong_shard, CheckpointFormatError, r"'a' is in two\.safetensors, which holds no"),
    HostileFolder("truncated_shard", _truncated_shard, CheckpointFormatError, r"two\.safetensors: tensor 'b' lies"),
    HostileFolder("ambiguous_key", _ambiguous, CheckpointFormatError, r"'b' is in one\.safetensors and in two"),
    HostileFolder("shard_is_folder", _shard_is_folder, CheckpointNotFoundError, r"names the file 'one\.safetensors"),
    HostileFolder("dangling_link", _dangling_link, CheckpointNotFoundError, r"names the file 'one\.safetensors"),
    HostileFolder("two_files_no_index", _two_files, CheckpointFormatError, r"no model\.safetensors\.index\.json"),
    HostileFolder("one_shard_of_three", _one_of_three, CheckpointFormatError, r"no model\.safetensors\.index\.json"),
    HostileFolder("index_not_json", _index_is_text, CheckpointFormatError, r"index\.json: is not JSON"),
    HostileFolder("index_of_lists", _index_of_lists, CheckpointFormatError, r"holds no 'weight_map'"),
    HostileFolder("index_without_map", _index_empty, CheckpointFormatError, r"holds no 'weight_map'"),
    HostileFolder("pickle_with_code", _pickle_with_code, CheckpointFormatError, r"could run code.*\.system"),
    HostileFolder("raw_pickle_with_code", _raw_pickle_with_code, CheckpointFormatError, r"could run code"),
    HostileFolder("not_a_zip", _not_a_zip, CheckpointFormatError, r"damaged"),
    HostileFolder("truncated_zip", _truncated_zip, CheckpointFormatError, r"damaged"),
    HostileFolder("empty_bin", _empty_bin, CheckpointFormatError, r"damaged"),
    HostileFolder("training_state", _training_state, CheckpointFormatError, r"'model' is a dict, not a tensor"),
    HostileFolder("list_of_tensors", _list_of_tensors, CheckpointFormatError, r"holds a list"),
    HostileFolder("sparse_bin", _sparse_bin, CheckpointFormatError, r"'a' is sparse"),
    HostileFolder("zip_without_storage", _zip_without_storage, CheckpointFormatError, r"damaged"),
    HostileFolder("zip_with_short_storage", _zip_with_short_storage, CheckpointFormatError, r"damaged"),
    HostileFolder("index_duplicate_key", _duplicate_key, CheckpointFormatError, r"names 'a' twice"),
    HostileFolder("index_not_utf8", _index_not_utf8, CheckpointFormatError, r"is not JSON \('utf-8'"),
    HostileFolder("index_infinite_name", _infinite_name, CheckpointFormatError, r"'a' in the file inf, which is no"),
    HostileFolder("index_endless_name", _endless_name, CheckpointNotFoundError, r"names the file 'xxx"),
    HostileFolder("index_moves_the_cursor", _name_that_moves_the_cursor, CheckpointNotFoundError, r"'\\x1b\[31mred\\n"),
    HostileFolder("index_name_no_text", _name_that_is_no_text, CheckpointNotFoundError, r"names the file '\\udce9"),
    HostileFolder("config_as_weights", _config_as_weights, CheckpointFormatError, r"'config\.json' as a file of"),
    HostileFolder("index_as_weights", _index_as_weights, CheckpointFormatError, r"index\.json' as a file of"),
    HostileFolder("index_is_folder", _index_is_folder, CheckpointFormatError, r"is a folder, not a file"),
    HostileFolder("link_to_itself", _link_to_itself, CheckpointFormatError, r"Too many levels of symbolic links"),
    HostileFolder("bin_index_missing", _bin_index_missing, CheckpointNotFoundError, r"names the file 'pytorch_model"),
]
