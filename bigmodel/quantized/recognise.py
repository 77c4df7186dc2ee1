"""Which weights of a checkpoint are stored quantised, and how: from its config and headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointFormatError
from ..sources.headers import TensorEntry
from .formats import awq, bitsandbytes, compressed_tensors, fp8, gguf, gptq, mxfp4
from .formats.format import Read, Scheme, WeightFormat, refuse_config

FORMATS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "mxfp4": mxfp4.read,
    "bitsandbytes": bitsandbytes.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "gguf": gguf.read,
}
"""Reader of the ``quantization_config``, by ``quant_method``."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored quantised.

    Attributes:
        name: the weight's name in an unquantised checkpoint.
        format: how it is stored.
        tensors: its tensors in the header by leaf.
    """

    name: str
    format: WeightFormat
    tensors: Mapping[str, TensorEntry]


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a model's config, or of the text model within it; None if there is none.

    Raises:
        CheckpointFormatError: it is not an object.
    """
    for owner in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            found = owner.get(name) if isinstance(owner, Mapping) else None
            if found:
                if not isinstance(found, Mapping):
                    raise refuse_config(f"is {found!r:.60}, not an object")
                return found
    return None


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a checkpoint with this config are stored; None if they are not quantised.

    Raises:
        CheckpointFormatError: the format is unknown, or a value of it is not supported.
    """
    found = quantization_config(config)
    if found is None:
        return None
    method = found.get("quant_method")
    if method is None and ("load_in_4bit" in found or "load_in_8bit" in found):
        method = "bitsandbytes"
    read = FORMATS.get(method) if isinstance(method, str) else None
    if read is None:
        raise refuse_config(
            f"quant_method is {method!r:.60}, which is not supported; {', '.join(FORMATS)} are. "
            "Use one of those, or the full-precision checkpoint"
        )
    return read(found)


def stored_weights(
    scheme: Scheme, entries: Mapping[str, TensorEntry], source: str, read: Read | None = None
) -> dict[str, StoredWeight]:
    """Return the weights that are stored quantised, by name.

    Args:
        scheme: how they are stored.
        entries: the tensors of the checkpoint by key.
        source: name of the checkpoint for messages.
        read: reads small tensors that describe a weight; None: only headers are at hand.

    Raises:
        CheckpointFormatError: a weight is in no known format, or has no scales; or none is quantised.
    """
    grouped: dict[str, dict[str, TensorEntry]] = {}
    split, leaves = scheme.split, scheme.leaves
    for key, entry in entries.items():
        name, leaf = split(key)
        if leaf in leaves:
            grouped.setdefault(name, {})[leaf] = entry
    found = {}
    for name, tensors in grouped.items():
        if scheme.marks.isdisjoint(tensors):
            weight = tensors.get("weight")
            if weight is not None and weight.dtype in _NEVER_WHOLE:
                raise CheckpointFormatError(f"{source}: {name} is {weight.dtype} and its scales are missing")
            continue
        try:
            found[name] = StoredWeight(name, scheme.format_of(name, tensors, read), tensors)
        except ValueError as error:
            raise CheckpointFormatError(f"{source}: {name} is stored as {scheme.method}, but {error}") from error
    if not found:
        raise CheckpointFormatError(
            f"{source}: its config says that weights are quantised ({scheme.method}), but no tensor is stored so; the "
            "files are of another checkpoint, or quantization_config is left over and can be removed from config.json"
        )
    return found


_NEVER_WHOLE = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32})
"""Dtypes in which no weight is stored without scales."""
