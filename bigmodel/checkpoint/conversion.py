"""From the keys of a checkpoint to the names of a model, as transformers converts them when it loads.

transformers v5 renames keys, and merges, splits or reorders tensors: the experts of a Mixtral or Qwen MoE layer, one
tensor each in the checkpoint, become one in the model. What is merely renamed can still be used where it lies in its
file; what is fused has to be made in memory. The rules are transformers' own; here they are only looked up, lazily.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..sources.headers import TensorEntry
from .fusion import Fusion


@dataclass(frozen=True)
class Source:
    """Where one tensor of a model comes from.

    Attributes:
        keys: the tensors of the checkpoint it is made from.
        dtype: its dtype as it comes from the checkpoint.
        shape: its shape as it comes from the checkpoint.
        fusion: how it is made from them; None where it is the one tensor as it is.
    """

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    fusion: Fusion | None = None

    @property
    def in_place(self) -> bool:
        """Whether the tensor can be used where it lies in its file."""
        return self.fusion is None


@dataclass
class Conversion:
    """How the tensors of a checkpoint become those of a model.

    Attributes:
        sources: by the model's names, for each that the checkpoint provides.
        unexpected: keys of the checkpoint that the model has no use for, but for those it says to ignore.
        used: transformers' conversions that applied; it wants them to write the checkpoint's layout again.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    used: list[Any] | None = None

    @property
    def fused(self) -> list[str]:
        """Names of the model's tensors that are no tensor of the checkpoint, so cannot lie on disk in place."""
        return [name for name, source in self.sources.items() if not source.in_place]


def convert_keys(model: nn.Module, names: dict[str, Any], entries: Mapping[str, TensorEntry]) -> Conversion:
    """Find where each tensor of `model` comes from.

    Args:
        model: a transformers model or any other module; may be on meta.
        names: the names of its state dict (the values do not matter, but must not be None).
        entries: the tensors of the checkpoint by key.

    Raises:
        CheckpointMismatchError: tensors that are to be fused do not fit each other.
    """
    if is_transformers_model(model):
        return _transformers_conversion(model, names, entries)
    conversion = Conversion()
    for key, entry in entries.items():
        if key in names:
            conversion.sources[key] = Source((key,), entry.dtype, entry.shape)
        else:
            conversion.unexpected.append(key)
    return conversion


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` is a transformers model, found out without importing transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _transformers_conversion(model: Any, names: dict[str, Any], entries: Mapping[str, TensorEntry]) -> Conversion:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model) or []
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    conversion, fusions = Conversion(), dict[str, Fusion]()
    # The order decides which expert is which.
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)  # it bears the model's own name already
        if name not in names:
            conversion.unexpected.append(key)
        elif pattern is None:
            conversion.sources[name] = Source((key,), entries[key].dtype, entries[key].shape)
        else:
            if name not in fusions:
                fusions[name] = Fusion(name, deepcopy(by_pattern[pattern]), model)
            fusions[name].add(pattern, entries[key])
    for fusion in fusions.values():
        for name, made in fusion.targets().items():
            conversion.sources[name] = Source(fusion.keys, made.dtype, tuple(made.shape), fusion)
    conversion.unexpected = _not_ignored(model, conversion.unexpected)
    conversion.used = [rule for rule in mapping if rule.was_used()]
    return conversion


def _not_ignored(model: Any, keys: list[str]) -> list[str]:
    """Without the keys that the model's class says to ignore, and those of buffers that are not saved any more."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [key for key in keys if ignored.search(key) is None]
