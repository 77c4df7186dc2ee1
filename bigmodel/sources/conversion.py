"""Converts the keys of a checkpoint to the names of a model, as transformers does on loading.

transformers v5 renames keys, and merges, splits or reorders tensors: the experts of a Mixtral or Qwen MoE layer, one
tensor each in the checkpoint, are one tensor in the model. A renamed tensor can still be used in place in its file; a
fused one (`Fusion`) must be built in memory. The rules are transformers' own, imported when needed.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatchError
from .headers import TensorEntry


@dataclass(frozen=True)
class FusedPart:
    """One tensor of the checkpoint and its place in the fused tensor.

    Attributes:
        key: the checkpoint's key.
        index: index of the part in the fused tensor; the part has the shape of the checkpoint's tensor.
    """

    key: str
    index: tuple[int | slice, ...]


class Fusion:
    """One of transformers' conversions, applied to some tensors of a checkpoint.

    Args:
        name: name in the model of its first result.
        converter: transformers' ``WeightConverter``, not used before.
        model: the transformers model; conversions read its shapes and config.
    """

    def __init__(self, name: str, converter: Any, model: Any) -> None:
        self.name = name
        self._converter = converter
        self._model = model
        self._parts: dict[str, list[TensorEntry]] = defaultdict(list)
        self._targets: dict[str, torch.Tensor] | None = None

    def add(self, pattern: str, entry: TensorEntry) -> None:
        """Add a tensor that matches the converter's source `pattern`. The order within a pattern matters."""
        self._parts[pattern].append(entry)
        self._targets = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the checkpoint that it reads, ordered by source pattern."""
        return tuple(entry.name for entries in self._parts.values() for entry in entries)

    @property
    def operations(self) -> list[Any]:
        """transformers' operations, in the order of application."""
        return list(self._converter.operations)

    def targets(self) -> dict[str, torch.Tensor]:
        """Return its results on meta, by the model's names.

        Raises:
            CheckpointMismatchError: the tensors do not fit each other.
        """
        if self._targets is None:
            self._targets = self.evaluate(lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        return self._targets

    def evaluate(self, read: Callable[[TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the conversion to the tensors that `read` returns; return the results by the model's names.

        Raises:
            CheckpointMismatchError: the tensors do not fit each other.
        """
        converter = deepcopy(self._converter)
        for pattern, entries in self._parts.items():
            for entry in entries:
                converter.add_tensor(self.name, entry.name, pattern, read(entry))
        try:
            results = converter.convert(self.name, model=self._model, config=self._model.config)
        except Exception as error:  # transformers' operations raise errors of any type
            shown = ", ".join(self.keys[:3]) + (", ..." if len(self.keys) > 3 else "")
            raise CheckpointMismatchError(
                f"{self.name} is made from {len(self.keys)} tensors of the checkpoint ({shown}), which do not fit "
                f"together ({error}); some may be missing, or belong to another model"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}

    def parts(self) -> list[FusedPart] | None:
        """Return each checkpoint tensor's index in the fused one; None unless they are only stacked and concatenated.

        It allows filling a fused tensor without intermediate copies, and reading a part without the rest.
        """
        kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in self._converter.operations]
        parts = [self._parts[p] for p in self._converter.source_patterns if p in self._parts]
        if kinds == [("MergeModulelist", 0)] and len(parts) == 1:
            found = [FusedPart(entry.name, (i,)) for i, entry in enumerate(parts[0])]
        elif kinds == [("MergeModulelist", 0), ("Concatenate", 1)]:
            found = _stacked_and_concatenated(parts)
        else:
            return None
        return found if self._is_covered_by(found) else None

    def _is_covered_by(self, parts: list[FusedPart]) -> bool:
        targets = self.targets()
        if list(targets) != [self.name]:
            return False
        whole = targets[self.name]
        shapes = {entry.name: entry.shape for entries in self._parts.values() for entry in entries}
        return all(whole[part.index].shape == shapes[part.key] for part in parts) and whole.numel() == sum(
            prod(shape) for shape in shapes.values()
        )


def _stacked_and_concatenated(parts: list[list[TensorEntry]]) -> list[FusedPart]:
    """Stack the tensors of each source pattern along a new first dimension, and join the stacks along the second."""
    found, start = [], 0
    for entries in parts:
        rows = entries[0].shape[0] if entries[0].shape else 0
        found += [FusedPart(entry.name, (i, slice(start, start + rows))) for i, entry in enumerate(entries)]
        start += rows
    return found


class StackedFusion(Fusion):
    """A tensor whose parts, (index, range of rows) each, are tensors of the checkpoint.

    Args:
        name: its name in the model.
        parts: its parts and their entries.
    """

    def __init__(self, name: str, parts: Sequence[tuple[FusedPart, TensorEntry]]) -> None:
        super().__init__(name, None, None)
        self._stacked = list(parts)
        first = self._stacked[0][1]
        if any((entry.shape, entry.dtype) != (first.shape, first.dtype) for _, entry in self._stacked):
            raise CheckpointMismatchError(f"{name}: its parts {first.name}, ... differ in shape or dtype")
        experts: list[Any] = [part.index[0] for part, _ in self._stacked]
        rows: list[Any] = [part.index[1] for part, _ in self._stacked]
        sizes = (max(experts) + 1, max(each.stop for each in rows), *first.shape[1:])
        self._targets = {name: torch.empty(sizes, dtype=first.dtype, device="meta")}

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(part.key for part, _ in self._stacked)

    @property
    def operations(self) -> list[Any]:
        return []

    def targets(self) -> dict[str, torch.Tensor]:
        assert self._targets is not None
        return self._targets

    def evaluate(self, read: Callable[[TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        target = self.targets()[self.name]
        whole = torch.empty(target.shape, dtype=target.dtype)
        for part, entry in self._stacked:
            whole[part.index].copy_(read(entry))
        return {self.name: whole}

    def parts(self) -> list[FusedPart]:
        return [part for part, _ in self._stacked]


@dataclass(frozen=True)
class TensorSource:
    """The checkpoint tensors that provide one tensor of a model.

    Attributes:
        keys: keys of the checkpoint tensors.
        dtype: dtype in the checkpoint.
        shape: shape in the checkpoint, after fusion.
        fusion: the conversion that builds it; None for a single tensor used as it is.
    """

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    fusion: Fusion | None = None

    @property
    def in_place(self) -> bool:
        """Whether it is one tensor of the checkpoint, which can be used in its file."""
        return self.fusion is None


@dataclass
class Conversion:
    """The conversion of a checkpoint's tensors to those of a model.

    Attributes:
        sources: the source of each tensor that the checkpoint provides, by the model's names.
        unexpected: keys of the checkpoint that the model does not use, except those that its class ignores.
        used: transformers' conversions that applied; it needs them to save in the checkpoint's layout.
    """

    sources: dict[str, TensorSource] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    used: list[Any] | None = None

    @property
    def fused(self) -> list[str]:
        """Names of the model's tensors that are fused from several, so cannot be used in place on disk."""
        return [name for name, source in self.sources.items() if not source.in_place]


def convert_keys(
    model: nn.Module,
    names: dict[str, Any],
    entries: Mapping[str, TensorEntry],
    known: Mapping[str, tuple[FusedPart, ...]] | None = None,
) -> Conversion:
    """Find the checkpoint tensors that provide each tensor of `model`.

    Args:
        model: a transformers model or any other module; may be on meta.
        names: the names of its state dict (values are not used, but must not be None).
        entries: the tensors of the checkpoint by key.
        known: the parts of those tensors of the model whose sources are known already.

    Raises:
        CheckpointMismatchError: tensors to be fused do not fit each other.
    """
    sources = {
        name: _known_source(name, parts, entries)
        for name, parts in (known or {}).items()
        if all(part.key in entries for part in parts)
    }
    used = {key for source in sources.values() for key in source.keys}
    entries = {key: entry for key, entry in entries.items() if key not in used} if used else entries
    conversion = _conversion(model, names, entries)
    conversion.sources.update(sources)
    return conversion


def _conversion(model: nn.Module, names: dict[str, Any], entries: Mapping[str, TensorEntry]) -> Conversion:
    if is_transformers_model(model):
        return _transformers_conversion(model, names, entries)
    conversion = Conversion()
    for key, entry in entries.items():
        if key in names:
            conversion.sources[key] = TensorSource((key,), entry.dtype, entry.shape)
        else:
            conversion.unexpected.append(key)
    return conversion


def _known_source(name: str, parts: tuple[FusedPart, ...], entries: Mapping[str, TensorEntry]) -> TensorSource:
    """Return the source that consists of `parts`."""
    first = entries[parts[0].key]
    if not parts[0].index:
        return TensorSource((first.name,), first.dtype, first.shape)
    fusion = StackedFusion(name, [(part, entries[part.key]) for part in parts])
    target = fusion.targets()[name]
    return TensorSource(fusion.keys, target.dtype, tuple(target.shape), fusion)


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` is a transformers model. Does not import transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


class KeyRules:
    """transformers' rules for the keys of a model's checkpoints.

    Args:
        model: the transformers model.
        names: names of its tensors (values are not used, but must not be None).
    """

    def __init__(self, model: Any, names: dict[str, Any]) -> None:
        self._model, self._names = model, names
        self._has_own = _may_have_rules(model)
        self._of_experts: dict[str, tuple[str, str]] = {}  # by key of an expert without its number

    @cached_property
    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return get_model_conversion_mapping(self._model) or []

    @cached_property
    def _renamings(self) -> list[Any]:
        from transformers.core_model_loading import WeightRenaming

        return [rule for rule in self._mapping if isinstance(rule, WeightRenaming)]

    @cached_property
    def _converters(self) -> list[Any]:
        from transformers.core_model_loading import WeightConverter

        return [rule for rule in self._mapping if isinstance(rule, WeightConverter)]

    @cached_property
    def _by_pattern(self) -> dict[str, Any]:
        return {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def rename(self, key: str) -> tuple[str, str | None]:
        """Return the model's name for a key of the checkpoint, and the pattern of the fusion it belongs to, if any.

        The experts of a layer that are fused into one tensor are looked up once.
        """
        expert = _EXPERT.fullmatch(key)
        if expert is None:
            return self._renamed(key)
        without_number = f"{expert[1]}*{expert[3]}"
        if without_number in self._of_experts:
            return self._of_experts[without_number]
        name, pattern = self._renamed(key)
        if pattern is not None and f".{expert[2]}." not in name:
            self._of_experts[without_number] = name, pattern
        return name, pattern

    def _renamed(self, key: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        if key in self._names and not self._has_own:
            return rename_source_key(key, [], [], prefix, self._names)
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._names)
        if name not in self._names and key in self._names:
            return rename_source_key(key, [], [], prefix, self._names)  # the key is the model's name already
        return name, pattern

    def fusion(self, name: str, pattern: str) -> Fusion:
        """Return an empty fusion for the tensor `name` by the rule with a source `pattern`."""
        return Fusion(name, deepcopy(self._by_pattern[pattern]), self._model)

    def used(self) -> list[Any]:
        """Return transformers' conversions that applied to a key."""
        return [rule for rule in self._mapping if rule.was_used()] if "_mapping" in vars(self) else []


def _may_have_rules(model: nn.Module) -> bool:
    """Return whether transformers may have rules for the keys of a model or a part of it, beside those for all models.

    It makes the rules of all classes at once, with a thousand regular expressions, which takes as long as to load a
    small model. A class that the file with the rules does not name has none, unless they are made already: only then
    can others be registered.
    """
    from transformers import PreTrainedModel, conversion_mapping

    if getattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", ()) is not None:
        return True
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    names = {name for part in parts for name in (type(part).__name__, part.config.model_type)}
    return any(f'"{name}"' in _text_of_rules() or f"'{name}'" in _text_of_rules() for name in names)


@cache
def _text_of_rules() -> str:
    from transformers import conversion_mapping

    return Path(conversion_mapping.__file__).read_text(encoding="utf-8")


def _transformers_conversion(model: Any, names: dict[str, Any], entries: Mapping[str, TensorEntry]) -> Conversion:
    from transformers.core_model_loading import dot_natural_key

    rules = KeyRules(model, names)
    conversion, fusions = Conversion(), dict[str, Fusion]()
    # Experts are numbered by their order.
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rules.rename(key)
        if name not in names:
            conversion.unexpected.append(key)
        elif pattern is None:
            conversion.sources[name] = TensorSource((key,), entries[key].dtype, entries[key].shape)
        else:
            if name not in fusions:
                fusions[name] = rules.fusion(name, pattern)
            fusions[name].add(pattern, entries[key])
    for fusion in fusions.values():
        for name, target in fusion.targets().items():
            conversion.sources[name] = TensorSource(fusion.keys, target.dtype, tuple(target.shape), fusion)
    conversion.unexpected = _not_ignored(model, conversion.unexpected)
    conversion.used = rules.used()
    return conversion


def _not_ignored(model: Any, keys: list[str]) -> list[str]:
    """Return `keys` without those that the model's class ignores and those of buffers that are no longer saved."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [key for key in keys if ignored.search(key) is None]
