"""Attention of a chunk of a prompt, with fewer heads of keys and values than of queries, without copies of these.

Where a mask is given, transformers repeats keys and values until they have as many heads as queries, since the fast
kernels of PyTorch take either a mask or fewer heads. The copies grow with the context: 1,000,000 tokens of Llama 3 8B
take 8.2 GB of each in bfloat16, in every layer, whatever the size of the chunk. Here the first query head of each group
attends, then the second of each, and so on: each call has the keys and values as they are. Every head is computed as
before, so the bits are the same.

A plan that counts chunks counts this; a dispatched model runs prompts by it.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = "bigmodel_sdpa_by_group"
"""The attention function, as transformers' registries know it."""

REPLACED = "sdpa"
"""The attention function of transformers that it stands for."""

_WHOLE = ("softcap", "position_bias", "cache", "output_attentions")
"""Arguments of `sdpa` that only it understands, or refuses."""

_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not\s+in\b)")

_lock = threading.Lock()
_open: Counter[int] = Counter()  # by id of a config: contexts that are open


@contextmanager
def attention_by_group(model: nn.Module) -> Iterator[None]:
    """Run forwards of `model` whose attention is PyTorch's (`sdpa`) without copies of keys and values.

    Forwards of other threads meanwhile compute the same. A model whose code asks for the name of its attention function
    is left as it is.

    Args:
        model: a model of transformers, or any other, which is left as it is.
    """
    configs = _configs(model)
    if configs:
        _register()
    with _lock:
        for config in configs:
            _open[id(config)] += 1
            config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _open[id(config)] -= 1
                if not _open[id(config)]:
                    del _open[id(config)]
                    config._attn_implementation_internal = REPLACED


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs by which modules with fewer heads of keys and values choose their attention function."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if (
            getattr(module, "num_key_value_groups", 1) != 1
            and getattr(config, "_attn_implementation_internal", None) in (REPLACED, NAME)
            and not _asks_for_name(type(module))
        ):
            found[id(config)] = config
    return list(found.values())


def _asks_for_name(kind: type[nn.Module]) -> bool:
    """Return whether the file of a class compares names of attention functions, or is not known."""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        return True
    return file is None or _compares_names(Path(file))


@cache
def _compares_names(file: Path) -> bool:
    return not file.is_file() or _ASKS.search(file.read_text(encoding="utf-8", errors="replace")) is not None


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `sdpa` of transformers does; see its interface of attention functions.

    Args:
        module: the attention module, whose ``num_key_value_groups`` heads of queries share one of keys and values.
        query: shape (batch, heads, tokens, size).
        key: shape (batch, heads / groups, all tokens, size).
        value: likewise.
        attention_mask: shape (batch or 1, 1, tokens, all tokens), boolean or added to scores; None: none.
        dropout: share of the weights that is dropped.
        scaling: factor of the scores; None: 1 / sqrt(size).
        more: what `sdpa` takes beside.

    Returns:
        The output, shape (batch, tokens, heads, size), and None in place of the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups: int = getattr(module, "num_key_value_groups", 1)
    tokens = query.shape[2]
    is_shared = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    if groups == 1 or tokens == 1 or not is_shared or any(more.get(each) not in (None, False) for each in _WHOLE):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    output = query.new_empty(query.shape[0], tokens, key.shape[1], groups, value.shape[-1])
    by_group = query.unflatten(1, (-1, groups))
    for number in range(groups):
        heads = nn.functional.scaled_dot_product_attention(
            by_group[:, :, number], key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        output[:, :, :, number] = heads.transpose(1, 2)
        del heads
    return output.flatten(2, 3), None
