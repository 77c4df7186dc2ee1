"""The checkpoints of benchmarks: random weights, written once, stored in the user's cache.

A checkpoint is an ordinary folder with ``config.json``, safetensors shards and their index. It is renamed to its final
name when it is complete, so an interrupted run leaves no partial checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigmodel.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Spec:
    """The specification of a checkpoint.

    Attributes:
        model_type: Architecture, as in transformers' configs.
        config: Its sizes, by the fields of transformers' configs.
        dtype: Dtype of all weights.
        shard_bytes: Largest size of a shard, except for one of a single tensor.
        seed: Seed of the weights.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    shard_bytes: int = 10**9
    seed: int = 0

    @property
    def digest(self) -> str:
        """Return a short hash of the specification."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]


def _llama(hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def _mixtral(hidden: int, layers: int, intermediate: int, heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = _llama(hidden, layers, intermediate, heads, heads // 2, vocabulary)
    return {**sizes, "num_local_experts": 8, "num_experts_per_tok": 2}


SPECS: dict[str, Spec] = {
    "llama-1b": Spec("llama", _llama(2048, 22, 5632, 32, 4, 32000)),
    "llama-40": Spec("llama", _llama(512, 40, 1408, 8, 4, 4096), shard_bytes=10**8),
    "llama-8b": Spec("llama", _llama(4096, 32, 14336, 32, 8, 128256), dtype="bfloat16", shard_bytes=5 * 10**9),
    "mixtral": Spec("mixtral", _mixtral(1024, 8, 3584, 16, 8192)),
    "llama-half": Spec("llama", _llama(1024, 8, 2816, 16, 8, 4096), dtype="bfloat16"),
    "mixtral-small-half": Spec("mixtral", _mixtral(512, 4, 1024, 8, 4096), dtype="bfloat16"),
    "llama-400m": Spec("llama", _llama(2048, 8, 5632, 32, 4, 8192), dtype="bfloat16"),
    "tiny-half": Spec("llama", _llama(64, 4, 128, 4, 2, 256), dtype="bfloat16"),
    "tiny-mixtral-half": Spec("mixtral", _mixtral(64, 2, 96, 4, 256), dtype="bfloat16"),
    "tiny": Spec("llama", _llama(64, 4, 128, 4, 2, 256), shard_bytes=300_000),
    "tiny-mixtral": Spec("mixtral", _mixtral(64, 2, 96, 4, 256), shard_bytes=500_000),
}
"""Specifications by name. ``llama-1b`` has 1.1 billion parameters (4.4 GB), ``llama-8b`` the shapes of Llama 3 8B (16
GB). Those named "half" are of bfloat16: what is quantised is measured beside them.
"""


def checkpoint(name: str, workdir: Path) -> Path:
    """Return the folder of a checkpoint, after writing it if it does not exist.

    Args:
        name: One of `SPECS`, or a path, which is returned as it is.
        workdir: Folder of checkpoints.

    Raises:
        CheckpointNotFoundError: The name is neither.
    """
    if name in SPECS:
        return make(SPECS[name], workdir / f"{name}-{SPECS[name].digest}")
    if Path(name).exists():
        return Path(name)
    raise CheckpointNotFoundError(f"{name!r} is neither a path nor one of {', '.join(SPECS)}")


def make(spec: Spec, folder: Path) -> Path:
    """Write the checkpoint of `spec` to `folder`, unless it exists, and return `folder`.

    Raises:
        OSError: The disk is too full, or the folder cannot be written.
    """
    if (folder / INDEX).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = dict(tensor_shapes(spec))
    needed = sum(math.prod(shape) for shape in tensors.values()) * _dtype(spec).itemsize
    free = shutil.disk_usage(folder.parent).free
    if free < needed + 2**30:
        raise OSError(f"{folder.parent} has {free:,} bytes free, and {needed + 2**30:,} are needed for {folder.name}")
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(spec, tensors, building)
        os.chmod(building, 0o755)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return folder


def tensor_shapes(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a checkpoint's tensors in the published layout: experts one by one, not fused."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(spec))
    for name, tensor in model.state_dict().items():
        yield from _unfused(name, tuple(tensor.shape))


def _unfused(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Invert transformers' renaming and fusing of Mixtral's experts."""
    block = name.partition(".mlp.")[0] + ".block_sparse_moe"
    if name.endswith(".mlp.experts.gate_up_proj"):
        for expert in range(shape[0]):
            yield f"{block}.experts.{expert}.w1.weight", (shape[1] // 2, shape[2])
            yield f"{block}.experts.{expert}.w3.weight", (shape[1] // 2, shape[2])
    elif name.endswith(".mlp.experts.down_proj"):
        for expert in range(shape[0]):
            yield f"{block}.experts.{expert}.w2.weight", shape[1:]
    elif name.endswith(".mlp.gate.weight"):
        yield f"{block}.gate.weight", shape
    else:
        yield name, shape


def _write(spec: Spec, tensors: dict[str, tuple[int, ...]], folder: Path) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(tensors, spec.shard_bytes, _dtype(spec).itemsize))
    weight_map: dict[str, str] = {}
    draw = _drawer(spec)
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: draw(name, tensors[name]) for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(math.prod(shape) for shape in tensors.values()) * _dtype(spec).itemsize
    config = _config(spec)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _shards(tensors: dict[str, tuple[int, ...]], limit: int, itemsize: int) -> Iterator[list[str]]:
    """Yield the names of each shard, in order, none above `limit` bytes if its tensors allow that."""
    names: list[str] = []
    used = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * itemsize
        if names and used + nbytes > limit:
            yield names
            names, used = [], 0
        names.append(name)
        used += nbytes
    if names:
        yield names


def _drawer(spec: Spec) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """Return a function that draws a tensor's weights: ones for norms, else normal numbers with the initial spread."""
    import torch

    generator = torch.Generator().manual_seed(spec.seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=_dtype(spec))
        return (torch.randn(shape, generator=generator) * 0.02).to(_dtype(spec))

    return draw


def _dtype(spec: Spec) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def _config(spec: Spec) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = CONFIG_MAPPING[spec.model_type]
    config = kind(**spec.config, dtype=spec.dtype)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    config.architectures = [architecture.__name__]
    return config
