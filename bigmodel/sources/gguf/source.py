"""GGUF files as a source of models, and their tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError
from ..headers import TensorEntry
from ..local import ModelSource
from .model import GgufModel


class GgufSource(ModelSource):
    """A model in GGUF files. `path` is the file, or any one of a split model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def config_dict(self) -> dict[str, Any]:
        return dict(self._model.config)

    def weight_files(self) -> list[str]:
        return list(self._model.headers)

    def headers(self) -> dict[str, dict[str, TensorEntry]]:
        return {file: self._model.entries(file) for file in self._model.headers}

    def weight_map(self) -> dict[str, str]:
        return {name: named.parts[0].file for name, named in self._model.named.items()}

    def fetch_weights(self) -> Path:
        return self._model.path

    @cached_property
    def _model(self) -> GgufModel:
        return GgufModel(self.path)


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer that a GGUF file describes, as transformers converts it.

    Args:
        path: the file, or any one of a split model.

    Raises:
        CheckpointError: the file is damaged, or describes no tokenizer that transformers knows.
    """
    first = GgufModel(path).path  # refuses a file that transformers' reader would trust
    try:
        return _converted(first)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"{first}: describes no tokenizer that can be read ({error})") from error


def _converted(first: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:  # older versions find the converter by themselves, and need the package gguf
        return PreTrainedTokenizerFast.from_pretrained(first.parent, gguf_file=first.name)
    architecture, described, options = get_gguf_tokenizer(str(first))
    backend, more = convert_gguf_tokenizer(architecture, described)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**options, **more})
