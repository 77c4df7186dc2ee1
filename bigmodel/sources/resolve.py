"""From a model's name, an id on the Hub or a path, to where its config and headers come from."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from ..arguments import shown
from ..errors import CheckpointFormatError, CheckpointNotFoundError
from .headers import SafetensorsHeader, read_header
from .index import find_checkpoint_file, merge_weight_map, read_index

CONFIG_FILE = "config.json"


def open_source(
    id_or_path: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Where the config, the headers and, when asked for, the weights of a model come from. No weight is read.

    Args:
        id_or_path: a folder, a ``.safetensors`` or ``.index.json`` file, or a repository on the Hub
            (``"name"`` or ``"owner/name"``; the server is ``HF_ENDPOINT`` where that is set).
        revision: branch, tag or commit of the repository.
        token: access token; None takes the one that is logged in, False none.
        cache_dir: where downloads go; None takes huggingface_hub's cache.
        local_files_only: use the cache alone and ask no server.
        trust_remote_code: whether `ModelSource.fetch_weights` also downloads ``*.py``. None is run here.

    Raises:
        CheckpointNotFoundError: no such path, repository or revision, or the Hub cannot be reached and the
            cache does not hold the model.
    """
    if not isinstance(id_or_path, (str, os.PathLike)) or "\0" in os.fspath(id_or_path):
        raise CheckpointNotFoundError(f"{shown(id_or_path)} is neither a path nor the name of a repository")
    path = Path(id_or_path).expanduser()
    if path.exists():
        return LocalSource(path)
    name = os.fspath(id_or_path)
    if _looks_like_path(name):
        raise CheckpointNotFoundError(f"{name!r}: there is no such folder or file")
    # Imported here: a local model needs no HTTP client.
    from .hub import open_remote

    return open_remote(
        name,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )


def _looks_like_path(name: str) -> bool:
    return not name or name[0] in "./~\\" or name.count("/") > 1 or "\\" in name or Path(name).is_absolute()


class ModelSource(ABC):
    """A model's config and checkpoint headers, wherever they lie.

    Attributes:
        name: what to call it in messages: the path, or the repository's id.
    """

    name: str

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """``config.json`` as a dictionary."""

    @abstractmethod
    def weight_files(self) -> list[str]:
        """Names of the safetensors files that the weights are in. Nothing of them is read.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or one of its files is missing.
            CheckpointFormatError: it is of another format.
        """

    @abstractmethod
    def headers(self) -> dict[str, SafetensorsHeader]:
        """The header of every shard by file name. Only headers are read, and only once."""

    @abstractmethod
    def fetch_weights(self) -> Path:
        """The local path of the checkpoint, downloading it first if it is not local: a folder or a file."""

    @abstractmethod
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> name of the shard that holds it, for every tensor of the checkpoint."""


def parse_config(content: bytes, source: str) -> dict[str, Any]:
    """A ``config.json`` already in memory; `source` names it in messages."""
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{source}: is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointFormatError(f"{source}: holds a {type(config).__name__}; a model's config is an object")
    return config


class LocalSource(ModelSource):
    """A checkpoint in a folder, or a single ``.safetensors`` or ``.index.json`` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.folder = path if path.is_dir() else path.parent

    def config_dict(self) -> dict[str, Any]:
        path = self.folder / CONFIG_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self.folder}: has no {CONFIG_FILE}, so the architecture is not known; save the model's config there"
            ) from error
        return parse_config(content, str(path))

    def weight_files(self) -> list[str]:
        return self._files

    def headers(self) -> dict[str, SafetensorsHeader]:
        return self._headers

    def weight_map(self) -> dict[str, str]:
        return self._weight_map

    def fetch_weights(self) -> Path:
        return self.path

    @cached_property
    def _file(self) -> Path:
        return find_checkpoint_file(self.path)

    @cached_property
    def _index(self) -> dict[str, str] | None:
        return read_index(self._file) if self._file.suffix == ".json" else None

    @cached_property
    def _files(self) -> list[str]:
        files = sorted(set(self._index.values())) if self._index is not None else [self._file.name]
        for file in files:
            if not file.endswith(".safetensors"):
                raise CheckpointFormatError(
                    f"{self.folder / file}: is not safetensors, whose header can be read on its own. "
                    "Load the model once and write it with bigmodel.save_model"
                )
            if not (self.folder / file).is_file():
                raise CheckpointNotFoundError(
                    f"{self._file}: names the file {file!r}, which is not in {self.folder}; download it again"
                )
        return files

    @cached_property
    def _headers(self) -> dict[str, SafetensorsHeader]:
        return {file: read_header(self.folder / file) for file in self._files}

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        return merge_weight_map(self._headers, self._index, str(self._file))
