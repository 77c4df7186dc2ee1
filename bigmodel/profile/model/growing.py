"""Which modules of a model have keys and values that grow with the context, in layers of a cache of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def growing_layers(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return those of the named modules whose keys and values, if any, are all in layers of full attention.

    Layers with a sliding window keep few tokens, and layers that others share keys with are read by these: neither
    counts. Nor does any of a model whose forward takes no cache of transformers, or with an encoder beside the decoder.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return frozenset()
    if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        return frozenset()
    modules = dict(model.named_modules(remove_duplicate=False))
    indices = {name: layer_indices(modules[name]) for name in names}
    if not any(indices.values()):
        return frozenset()
    from transformers.cache_utils import DynamicCache, DynamicLayer

    layers = DynamicCache(config=config).layers
    full = {at for at, layer in enumerate(layers) if type(layer) is DynamicLayer} if layers else None
    return frozenset(name for name, found in indices.items() if found and (full is None or found <= full))


def layer_indices(module: nn.Module) -> set[int]:
    """Return the indices of the layers of a key-value cache that a module of a transformers model writes to."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in found if isinstance(index, int)}
