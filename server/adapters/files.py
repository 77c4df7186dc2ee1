"""Read LoRA adapters as peft publishes them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

All that an adapter says is checked before a model is loaded for it: what is not supported is refused by name, as a part
left out would be another adapter.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bigmodel.errors import ServeError
from bigmodel.sources.headers import read_header
from bigmodel.sources.local import parse_config

CHUNK_ROWS = 64
"""Rows that an adapter is computed for at once: they bound the memory that it takes beside its weights."""

WIDEST_ITEM = 4
"""Bytes of an element of what is computed, at most."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

MOST_CONFIG_BYTES = 1 << 20

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>A|B)\.weight")

_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole modules beside low ranks",
    "target_parameters": "parameters that are no module's weight",
    "trainable_token_indices": "tokens of its own",
    "alora_invocation_tokens": "adapters that begin within a text",
    "layer_replication": "repeated layers",
    "megatron_config": "Megatron's layers",
}
"""Settings that change more than low ranks, and what they stand for."""

DEFAULT_ALPHA = 8.0
"""``lora_alpha`` of peft where the settings do not say."""


@dataclass(frozen=True)
class LowRank:
    """One module's part of an adapter: ``scaling * up @ down`` is added to its weight.

    Attributes:
        down: [rank, input width], named ``lora_A`` in files.
        up: [output width, rank], named ``lora_B``.
        scaling: alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True)
class Adapter:
    """An adapter: its name for clients, and its parts by the name of their module."""

    name: str
    parts: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def digest(self) -> str:
        """SHA-256 of what it computes: names of modules, matrices and scalings. It does not depend on its name."""
        found = hashlib.sha256()
        for module in sorted(self.parts):
            part = self.parts[module]
            found.update(json.dumps([module, part.scaling]).encode())
            for tensor in (part.down, part.up):
                found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


def read_adapter(name: str, folder: str | Path) -> Adapter:
    """Read an adapter from its folder, in the dtypes that peft computes it in.

    Raises:
        ServeError: A file is missing, it is no LoRA adapter, or it needs what is not supported.
        CheckpointError: A file is damaged.
    """
    path = Path(folder).expanduser()
    settings = _settings(name, path)
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        why = "pickled weights are not read" if (path / "adapter_model.bin").exists() else "it has no weights"
        raise ServeError(f"adapter '{name}': {weights} is missing: {why}")
    halves: dict[str, dict[str, str]] = {}
    for key in read_header(weights):
        found = _KEY.fullmatch(key)
        if found is None:
            raise ServeError(f"adapter '{name}': {weights} holds '{key}', which is no low rank of a module's weight")
        halves.setdefault(found["module"], {})[found["half"]] = key
    # float16 and bfloat16 become float32, as in peft; copies are aligned, and products of others may have other bits.
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    tensors = {
        key: tensor.to(wide.get(tensor.dtype, tensor.dtype), copy=True) for key, tensor in load_file(weights).items()
    }
    parts = {}
    for module, keys in halves.items():
        found_halves = {half: tensors[key] for half, key in keys.items()}
        parts[module] = _part(f"adapter '{name}': {module}", module, found_halves, settings)
    if not parts:
        raise ServeError(f"adapter '{name}': {weights} holds no low ranks")
    return Adapter(name, parts)


def base_model(name: str, folder: str | Path) -> str | None:
    """The folder or Hub id of the model that an adapter was trained for, as its settings name it; None: they do not.

    Raises:
        ServeError: There are no settings, or they are not those of a LoRA adapter that is served.
    """
    base = _settings(name, Path(folder).expanduser()).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def _settings(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as file:
            settings = parse_config(file.read(MOST_CONFIG_BYTES), str(path))
    except OSError as error:
        raise ServeError(f"adapter '{name}': {path} cannot be read: {error.strerror}") from error
    if settings.get("peft_type") != "LORA":
        raise ServeError(f"adapter '{name}': {path} is of peft_type {settings.get('peft_type')!r}; only LORA is served")
    refused = [what for key, what in _REFUSED.items() if settings.get(key)]
    if settings.get("bias", "none") != "none":
        refused.append("biases of the model's layers")
    if refused:
        raise ServeError(f"adapter '{name}': {path} asks for {' and '.join(refused)}, which is not served")
    return settings


def _part(where: str, module: str, halves: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> LowRank:
    if len(halves) != 2:
        raise ServeError(f"{where} has lora_{'A' if 'A' in halves else 'B'} alone; both halves are needed")
    down, up = halves["A"], halves["B"]
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not down.is_floating_point():
        raise ServeError(f"{where} has matrices of shapes {list(down.shape)} and {list(up.shape)}; ranks must agree")
    rank = len(down)
    alpha = _number(where, "lora_alpha", _of_module(where, settings, module))
    root = settings.get("use_rslora", False) is True
    return LowRank(down, up, alpha / (math.sqrt(rank) if root else rank))


def _of_module(where: str, settings: Mapping[str, Any], module: str) -> Any:
    """The alpha of one module: that whose name is the end of the module's, as peft matches them, else that of all."""
    given = settings.get("alpha_pattern") or {}
    for pattern, value in given.items() if isinstance(given, dict) else ():
        if any(letter in pattern for letter in "^$*+?\\[](){}|"):
            raise ServeError(f"{where}: alpha_pattern has the expression {pattern!r}; only names of modules are served")
        if module == pattern or module.endswith(f".{pattern}"):
            return value
    return settings.get("lora_alpha", DEFAULT_ALPHA)


def _number(where: str, setting: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ServeError(f"{where}: {setting} is {value!r}, not a number")
    return float(value)


def adapters_bytes(adapters: Iterable[Adapter]) -> int:
    """Bytes that adapters take of a device at most: each part lies where its module runs, and is computed for
    `CHUNK_ROWS` rows at once."""
    found = list(adapters)
    parts = [part for adapter in found for part in adapter.parts.values()]
    widest = max((2 * part.down.shape[1] + len(part.down) + 4 * len(part.up) for part in parts), default=0)
    return sum(adapter.nbytes for adapter in found) + CHUNK_ROWS * widest * WIDEST_ITEM
