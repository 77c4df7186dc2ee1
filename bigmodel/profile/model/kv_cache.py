"""Bytes of a KV cache, computed from a config.

A layer with full attention caches one key and one value for each token and each key-value head. A layer with a sliding
window caches no more tokens than the window. Multi-head latent attention caches the latent vector and the rotary part
of the key for each token; implementations that expand these before caching cache keys and values of every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arguments import check_choice, shown, whole_number
from ...errors import PlanError
from .tensors import DtypeLike, dtype_bits

CACHES = ("dynamic", "static", "expanded")


def kv_cache_bytes(
    config: Any,
    batch_size: int,
    context_length: int,
    dtype: DtypeLike,
    cache: str = "dynamic",
) -> int:
    """Return the bytes of the KV cache of a decoder for `batch_size` sequences of `context_length` tokens.

    Args:
        config: a transformers config (of the text part, or one that has it).
        batch_size: sequences.
        context_length: tokens of each sequence; for "static", the maximum.
        dtype: dtype of keys and values.
        cache: "dynamic" (grows with the text), "static" (allocated for the whole context), or "expanded" (latent
            attention whose keys and values are cached for every head).

    Raises:
        PlanError: the config lacks layers or heads, or another argument is invalid.
    """
    return sum(layer_cache_bytes(config, batch_size, context_length, dtype, cache))


def layer_cache_bytes(
    config: Any,
    batch_size: int,
    context_length: int,
    dtype: DtypeLike,
    cache: str = "dynamic",
) -> list[int]:
    """Return the bytes of each layer's KV cache; arguments as for `kv_cache_bytes`."""
    check_choice("cache", cache, CACHES)
    batch_size, context_length = whole_number("batch_size", batch_size), whole_number("context_length", context_length)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_hidden_layers"):
        if not isinstance(getattr(text, name, None), int):
            raise PlanError(f"config is {shown(config)}, which has no {name}; give one of a transformers decoder")
    bits = dtype_bits(dtype) * batch_size * elements_per_token(text, cache)
    return [bits * tokens // 8 for tokens in tokens_held(text, context_length)]


def elements_per_token(config: Any, cache: str = "dynamic") -> int:
    """Return the number of elements that one layer caches for one token."""
    latent = getattr(config, "kv_lora_rank", None)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if latent is not None and cache == "expanded":
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return int(config.num_attention_heads * (key + value))
    if latent is not None:
        return int(latent + config.qk_rope_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads * 2 * width)


def tokens_held(config: Any, context_length: int) -> list[int]:
    """Return the number of tokens that each layer caches after `context_length` tokens."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if not kinds:
        kind = "sliding_attention" if window else "full_attention"
        kinds = [kind] * config.num_hidden_layers
    windowed = ("sliding_attention", "chunked_attention")
    return [min(window, context_length) if window and kind in windowed else context_length for kind in kinds]
