"""Writes a quantised checkpoint from a full one: shard by shard, within a memory budget, and whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..atomic_files import sync_folder, write_text
from ..devices import format_size, parse_size
from ..errors import BudgetError, CheckpointError
from ..profile import meta_model
from ..quantized.encode import INTERMEDIATE_BYTES, Encoding, encode_gpt_oss, encoding
from ..quantized.recognise import quantization_config
from ..sources.conversion import KeyRules, is_transformers_model
from ..sources.headers import TensorEntry
from ..sources.index import INDEX_FILE, SINGLE_FILE
from ..sources.local import CONFIG_FILE
from ..sources.resolve import open_source
from .checkpoint import Checkpoint
from .progress import byte_progress
from .write import Outgoing, write_safetensors

_SHARD_BYTES = 5 * 10**9
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_WHOLE = frozenset({"lm_head", "gate", "router", "shared_expert_gate", "score", "classifier"})
"""Last names of modules whose weights stay as they are: heads and routers."""


@dataclass(frozen=True)
class Quantised:
    """The written checkpoint.

    Attributes:
        folder: the new checkpoint.
        weights: weights that were quantised.
        kept: matrices of linear layers that stay as they were, for their rows are no multiple of the groups.
        before: bytes of the original's tensors.
        after: bytes of the new checkpoint's.
    """

    folder: Path
    weights: int
    kept: tuple[str, ...]
    before: int
    after: int


@dataclass(frozen=True)
class _Weight:
    """A tensor of the new checkpoint's source: the bytes and the tensors that it becomes."""

    name: str
    nbytes: int
    make: Callable[[], dict[str, torch.Tensor]]


def quantize_checkpoint(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    group_size: int | None = None,
    max_memory: int | str | None = None,
    revision: str | None = None,
) -> Quantised:
    """Write the quantised checkpoint of a model: config, tokenizer and other files are copied.

    Matrices of linear layers and of experts are quantised; embeddings, heads, routers and norms stay as they are. The
    format is compressed-tensors', or, for gpt-oss and mxfp4, gpt-oss's own.

    Args:
        model: a folder with a checkpoint, or a repository on the Hub.
        out: folder to write; it must not exist, or be empty.
        to: ``"int4"``, ``"int8"``, ``"fp8"`` or ``"mxfp4"``.
        group_size: elements that share a scale, of int4; None: 128.
        max_memory: bytes, or text such as ``"4GiB"``, for what is being written: one shard and intermediate results.
            None: shards of 5 GB.
        revision: branch, tag or commit of a repository.

    Raises:
        CheckpointError: the model does not exist, is quantised already, or cannot be quantised so; `out` exists.
        BudgetError: the budget does not hold the largest weight.
    """
    chosen = encoding(to, group_size)
    source = open_source(model, revision)
    config = source.config_dict()
    if quantization_config(config) is not None:
        raise CheckpointError(f"{source.name}: is quantised already; begin with the model's full checkpoint")
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already; name a folder that does not")
    skeleton = meta_model(source)
    found = source.fetch_weights()
    saved = Checkpoint.open(found)
    work = _TensorTreatment(skeleton, saved, chosen, source.name)
    shards = _shards(work.weights, None if max_memory is None else parse_size(max_memory))
    with _written_whole(target) as folder:
        _write(folder, shards, sum(saved.entry(name).nbytes for name in saved))
        _copy_files(found if found.is_dir() else found.parent, folder)
        content = {**config, "quantization_config": work.config()}
        write_text(folder / CONFIG_FILE, json.dumps(content, indent=2) + "\n")
    after = sum(weight.nbytes for weight in work.weights)
    return Quantised(target, work.quantised, tuple(work.unfitting), saved.total_bytes(), after)


class _TensorTreatment:
    """The treatment of each tensor of one checkpoint: quantised, copied or dropped."""

    def __init__(self, model: nn.Module, saved: Checkpoint, chosen: Encoding, source: str) -> None:
        self._saved, self._encoding = saved, chosen
        self._modules = dict(model.named_modules())
        self._names: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._rules = KeyRules(model, self._names) if is_transformers_model(model) else None
        self._own = chosen.target == "mxfp4" and any(map(self._is_fused, saved))
        self.quantised, self.unfitting, self._ignored = 0, list[str](), list[str]()
        if not self._own and any(map(self._is_fused, saved)):
            raise CheckpointError(
                f"{source}: its experts are stored as one tensor for each layer, which {chosen.target} has no "
                "published form of; use --to mxfp4"
            )
        self.weights = [self._weight(name) for name in saved]
        if self.quantised == 0:
            why = ""
            if self.unfitting:
                why = f": rows of {self.unfitting[0]} and others do not fill groups; use --to int8, or smaller groups"
            raise CheckpointError(
                f"{source}: has no matrix of a linear layer that can be quantised to {chosen.target}{why}"
            )

    def config(self) -> dict[str, Any]:
        """Return the new ``quantization_config``."""
        if self._own:
            return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(self._ignored)}
        weights = dict(self._encoding.settings)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self._encoding.kind,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "format": self._encoding.kind}},
            "ignore": sorted(self._ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _weight(self, name: str) -> _Weight:
        entry = self._saved.entry(name)
        if self._own and self._is_fused(name):
            self.quantised += 1
            return self._fused(name, entry)
        if not self._is_matrix(name, entry):
            return self._kept(name, entry)
        module = name.removesuffix(".weight")
        if self._own or module.rpartition(".")[2] in _WHOLE:
            self._ignored.append(module)
            return self._kept(name, entry)
        shape = (entry.shape[0], entry.shape[1])
        try:
            stored = self._encoding.format.stored(shape)
        except ValueError:
            self._ignored.append(module)
            self.unfitting.append(name)
            return self._kept(name, entry)
        self.quantised += 1
        required = {leaf: each for leaf, each in stored.items() if not each.optional or leaf == "weight_shape"}
        nbytes = sum(
            torch.Size(each.shape or ()).numel()
            * (8 if leaf == "weight_shape" else self._itemsize(leaf, each.dtypes, entry))
            for leaf, each in required.items()
        )
        return _Weight(name, nbytes, lambda: self._encoded(name, module))

    def _itemsize(self, leaf: str, dtypes: tuple[torch.dtype, ...], entry: TensorEntry) -> int:
        return entry.dtype.itemsize if entry.dtype in dtypes else dtypes[0].itemsize

    def _encoded(self, name: str, module: str) -> dict[str, torch.Tensor]:
        try:
            found = self._encoding.encode(self._saved[name])
        except CheckpointError as error:
            raise CheckpointError(f"{self._saved.path}: {name}: {error}") from error
        return {f"{module}.{leaf}": tensor for leaf, tensor in found.items()}

    def _kept(self, name: str, entry: TensorEntry) -> _Weight:
        return _Weight(name, entry.nbytes, lambda: {name: self._saved[name]})

    def _fused(self, name: str, entry: TensorEntry) -> _Weight:
        experts, columns, rows = entry.shape
        nbytes = experts * rows * columns // 2 + experts * rows * columns // 32

        def make() -> dict[str, torch.Tensor]:
            return {f"{name}_{leaf}": tensor for leaf, tensor in encode_gpt_oss(self._saved[name]).items()}

        return _Weight(name, nbytes, make)

    def _is_matrix(self, name: str, entry: TensorEntry) -> bool:
        """Whether a tensor is the weight of a linear layer, or a matrix of an expert."""
        if len(entry.shape) != 2 or not name.endswith(".weight") or not entry.dtype.is_floating_point:
            return False
        renamed, pattern = (name, None) if self._rules is None else self._rules.rename(name)
        if renamed not in self._names:
            return False
        if pattern is not None:
            return self._names[renamed].dim() == 3 and hasattr(self._module_of(renamed), "num_experts")
        return type(self._module_of(renamed)) is nn.Linear

    def _is_fused(self, name: str) -> bool:
        """Whether a tensor is the matrices (in, out) of all experts of a layer."""
        return (
            name in self._names
            and self._names[name].dim() == 3
            and hasattr(self._module_of(name), "num_experts")
            and len(self._saved.entry(name).shape) == 3
        )

    def _module_of(self, name: str) -> nn.Module:
        return self._modules[name.rpartition(".")[0]]


def _shards(weights: list[_Weight], budget: int | None) -> list[list[_Weight]]:
    """Split weights into shards of which one fits the budget beside intermediate results."""
    largest = max(weights, key=lambda weight: weight.nbytes)
    limit = _SHARD_BYTES if budget is None else min(_SHARD_BYTES, budget - INTERMEDIATE_BYTES)
    # Parts of a weight are joined at its end: for a moment it is there twice.
    limit -= 0 if budget is None else largest.nbytes
    if budget is not None and limit < largest.nbytes:
        least = 2 * largest.nbytes + INTERMEDIATE_BYTES
        raise BudgetError(
            f"max_memory is {format_size(budget)}, but {largest.name} takes {format_size(largest.nbytes)}, with "
            f"intermediate results {format_size(least)}; give {format_size(least - budget)} more"
        )
    shards: list[list[_Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes
    return shards


def _write(folder: Path, shards: list[list[_Weight]], total: int) -> None:
    weight_map: dict[str, str] = {}
    written = sum(weight.nbytes for shard in shards for weight in shard)
    with byte_progress("Quantising", written) as advance:
        for number, shard in enumerate(shards):
            name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE_FILE
            tensors: dict[str, torch.Tensor] = {}
            for weight in shard:
                tensors |= weight.make()
                advance(weight.nbytes)
            outgoing = [Outgoing.of(key, tensor) for key, tensor in tensors.items()]
            write_safetensors(folder / name, outgoing, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        content: Mapping[str, Any] = {"metadata": {"total_size": written}, "weight_map": weight_map}
        write_text(folder / INDEX_FILE, json.dumps(content, indent=2) + "\n")


def _copy_files(source: Path, folder: Path) -> None:
    """Copy what is beside the weights: tokenizer, settings of generation, code, licence."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != CONFIG_FILE and not path.name.endswith(_WEIGHTS) and path.name[0] != ".":
            shutil.copyfile(path, folder / path.name)


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that gets its name when the body completes, and is removed otherwise."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        folder.mkdir()
        yield folder
        sync_folder(folder)
        os.replace(folder, target)  # also onto an empty folder
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
