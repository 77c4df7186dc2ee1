"""A model in GGUF files, one or a split one: its config, and its tensors under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from ..headers import TensorEntry
from ..index import find_checkpoint_file
from .config import Metadata, architecture_of, config_of, dtype_of, heads_of
from .header import GgufHeader, GgufTensor, read_gguf_header
from .names import Named, named_tensors

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that is the checkpoint of the folder `path`; None if there is none."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    try:
        found = find_checkpoint_file(path)
    except CheckpointError:
        return None
    return found if found.suffix == SUFFIX else None


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that the GGUF file `path` belongs to, in order.

    Raises:
        CheckpointNotFoundError: one of a split model is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    files = [path.with_name(f"{found[1]}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointNotFoundError(
            f"{path}: is one of {count} files, of which {', '.join(missing[:3]) or 'none'} "
            f"{'is' if len(missing) == 1 else 'are'} not in {path.parent}; copy or download what is missing"
        )
    return files


class GgufModel:
    """A model in GGUF files.

    Args:
        path: the file, or any one of a split model.

    Attributes:
        path: the first file.
        headers: header of each file by its name.
        tensors: tensors of all files by their names there.
        named: tensors by transformers' names.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CheckpointFormatError: a file is damaged, or the architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        files = parts_of(path)
        self.path, self._source = files[0], str(files[0])
        self.headers: dict[str, GgufHeader] = {file.name: read_gguf_header(file) for file in files}
        self.tensors: dict[str, GgufTensor] = {}
        for header in self.headers.values():
            for name, tensor in header.tensors.items():
                if name in self.tensors:
                    raise CheckpointFormatError(f"{header.path}: {name!r} is in {self.tensors[name].file} too")
                self.tensors[name] = tensor
        self._check_split()
        self._metadata = Metadata(self.headers[self.path.name].metadata, self._source)
        self._architecture = architecture_of(self._metadata)
        self.named: dict[str, Named] = {}
        heads, dtype = heads_of(self._metadata), dtype_of(self.tensors)
        for named in named_tensors(self._architecture, self.tensors, heads, dtype, self._source):
            if named.entry.name in self.named:
                raise CheckpointFormatError(f"{self._source}: has two tensors for {named.entry.name}")
            self.named[named.entry.name] = named

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of its ``config.json``."""
        found = config_of(self._metadata, self._architecture, self.tensors, self._read)
        if any(named.stored for named in self.named.values()):
            heads = heads_of(self._metadata) if self._architecture.in_pairs else {}
            interleaved = self._architecture.interleaved
            found["quantization_config"] = {"quant_method": "gguf", "heads": heads, "interleaved": interleaved}
        return found

    def entries(self, file: str) -> dict[str, TensorEntry]:
        """Return the tensors of a file by transformers' names. One that is computed belongs to its first part's."""
        return {name: named.entry for name, named in self.named.items() if named.parts[0].file == file}

    def _check_split(self) -> None:
        values: Mapping[str, Any] = self.headers[self.path.name].metadata
        for key, found in (("split.count", len(self.headers)), ("split.tensors.count", len(self.tensors))):
            expected = values.get(key, 0)
            if expected not in (0, found) and (key != "split.count" or expected != 1):
                raise CheckpointFormatError(
                    f"{self._source}: its metadata {key} is {expected!r:.60}, but {found} were found; the files are "
                    "of different models, or have been renamed"
                )

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        """Return a small tensor of single elements."""
        if tensor.type.dtype is None or tensor.nbytes > 2**20:
            raise CheckpointFormatError(f"{self._source}: {tensor.name} is not a small tensor of numbers")
        with (self.path.parent / tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            return torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=tensor.type.dtype).view(tensor.shape)
