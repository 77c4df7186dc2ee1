"""The interface of model sources (config, headers, weights), and its implementation for a local folder or file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError, CheckpointNotFoundError
from .headers import SafetensorsHeader, TensorEntry, read_header
from .index import find_checkpoint_file, merge_weight_map, read_index
from .sampled import SampledHeaders, sample_headers

CONFIG_FILE = "config.json"

PIPELINE_FILE = "model_index.json"
"""Names the models of a pipeline of diffusers, each in a folder of its own."""


class ModelSource(ABC):
    """Provides the config and the checkpoint headers of a model.

    Attributes:
        name: the path or the repository's id, for messages.
    """

    name: str

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """Return ``config.json`` as a dictionary."""

    @abstractmethod
    def weight_files(self) -> list[str]:
        """Return the names of the safetensors files that hold the weights; none is read.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or one of its files is missing.
            CheckpointFormatError: the checkpoint has another format.
        """

    @abstractmethod
    def headers(self) -> Mapping[str, Mapping[str, TensorEntry]]:
        """Return the tensors of every shard by file name. Only headers are read, each once."""

    def sampled_headers(self) -> SampledHeaders | None:
        """Return the tensors with one expert of each layer standing for all; None if that is not possible."""
        return None

    @abstractmethod
    def fetch_weights(self) -> Path:
        """Return the local path of the checkpoint, a folder or a file, after downloading it if it is remote."""

    @abstractmethod
    def weight_map(self) -> dict[str, str]:
        """Return the name of the shard that holds each tensor, by tensor name."""


def parse_config(content: bytes, source: str) -> dict[str, Any]:
    """Parse the content of a ``config.json``; `source` names it in messages."""
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{source}: is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointFormatError(f"{source}: holds a {type(config).__name__}; a model's config is an object")
    return config


def refuse_pipeline(folder: Path) -> None:
    """Raise CheckpointFormatError for the folder of a pipeline, which holds several models and is none itself."""
    path = folder / PIPELINE_FILE
    if (folder / CONFIG_FILE).exists() or not path.exists():
        return
    content = parse_config(path.read_bytes(), str(path))
    models = sorted(name for name, value in content.items() if isinstance(value, list) and (folder / name).is_dir())
    raise CheckpointFormatError(
        f"{folder}: is a pipeline of several models ({', '.join(models)}): load it with diffusers, and call "
        "dispatch_model on each of them, or have bigmodel stand in for accelerate there (bigmodel run)"
    )


class LocalSource(ModelSource):
    """A checkpoint in a folder, or a single ``.safetensors`` or ``.index.json`` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.folder = path if path.is_dir() else path.parent

    def config_dict(self) -> dict[str, Any]:
        refuse_pipeline(self.folder)
        path = self.folder / CONFIG_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            if self.path.is_file():
                find_checkpoint_file(self.path)  # raises for a file that is no checkpoint's: then that is what is wrong
            raise CheckpointNotFoundError(
                f"{self.folder}: has no {CONFIG_FILE}, so the architecture is not known; save the model's config there"
            ) from error
        return parse_config(content, str(path))

    def weight_files(self) -> list[str]:
        return self._files

    def headers(self) -> dict[str, SafetensorsHeader]:
        return self._headers

    def sampled_headers(self) -> SampledHeaders | None:
        return sample_headers(self.folder / file for file in self._files)

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
