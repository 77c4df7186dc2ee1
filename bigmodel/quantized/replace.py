"""Puts modules that hold their weights as stored into a model on meta, by what the headers of its checkpoint say.

The config's lists of modules that are not quantised are not read: what is stored decides.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..devices import format_size
from ..errors import CheckpointFormatError
from ..sources.conversion import FusedPart, Fusion, KeyRules, is_transformers_model
from ..sources.headers import TensorEntry
from .embedding import become_embedding
from .experts import FusedWeight, QuantizedExperts, quantized_class
from .formats.format import FusedPlace, Read, Scheme
from .linear import QuantizedLinear
from .recognise import StoredWeight, read_scheme, stored_weights
from .stored import Published, remember

CHECKED_BYTES = 4 * 2**30
"""Scales that are read and checked before a model is loaded: all those of fp8 checkpoints, and of mxfp4 ones of 120
billion weights. The rest of larger ones is not checked: reading it would take as long as reading a tenth of a
checkpoint, of which most may stay on disk."""

logger = logging.getLogger(__name__)

Parts = list[tuple[FusedPart, StoredWeight]]
"""The matrices of a fused tensor, each with its place in it."""

Places = list[tuple[int, tuple[int | slice, ...]]]
"""Of each matrix of a fused tensor, its position among those given, and its index in it."""


def use_stored_weights(
    model: nn.Module,
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    source: str,
    read: Read | None = None,
    experts: int = 1,
) -> Published | None:
    """Replace the modules of `model` whose weights its checkpoint stores quantised; all, or after an exception none.

    Args:
        model: a model on meta.
        config: the content of the checkpoint's ``config.json``.
        entries: the tensors of the checkpoint by key.
        source: name of the checkpoint for messages.
        read: reads small tensors that describe a weight. None: only headers are at hand; modules then have the right
            bytes, but weights cannot be restored.
        experts: how many experts each entry of an expert stands for; other than 1 without `read`.

    Returns:
        What the model remembers of its checkpoint; None if that is not quantised.

    Raises:
        CheckpointFormatError: the format is not supported, a weight lacks tensors, or their shapes do not fit.
    """
    try:
        scheme = read_scheme(config)
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"{source}: {error}") from error
    if scheme is None:
        return None
    replacement = _Replacement(model, scheme, source, experts)
    weights = stored_weights(scheme, entries, source, read)
    replacement.find(weights.values(), entries)
    if read is not None:
        replacement.check_values(weights.values(), read)
    return replacement.make()


class _Replacement:
    """The modules of one model that are to be replaced."""

    def __init__(self, model: nn.Module, scheme: Scheme, source: str, experts: int) -> None:
        self._model, self._scheme, self._source = model, scheme, source
        self._experts = experts  # that each entry of an expert stands for
        self._known: dict[object, str | None] = {}  # by format, shape and layout of a weight: its problem
        self._modules = dict(model.named_modules())
        self._names: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._linears: dict[str, StoredWeight] = {}
        self._fused: dict[str, Parts] = {}
        self._whole: dict[str, StoredWeight] = {}
        self._embeddings: dict[str, StoredWeight] = {}
        self._interleaved: set[str] = set()
        self._places: dict[object, Places] = {}
        self._formats: Counter[str] = Counter()
        self._sources: dict[str, tuple[FusedPart, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._beside: dict[str, tuple[FusedPart, ...]] = {}

    def find(self, weights: Collection[StoredWeight], entries: Mapping[str, TensorEntry]) -> None:
        """Find the module of each weight, and check that it fits. Weights that the model does not have are left out."""
        rules = KeyRules(self._model, self._names) if is_transformers_model(self._model) else None
        if rules is not None:
            stored = {entry.name for weight in weights for entry in weight.tensors.values()}
            self._find_beside(rules, {key: entry for key, entry in entries.items() if key not in stored})
        pieces: dict[str, dict[str, list[StoredWeight]]] = defaultdict(lambda: defaultdict(list))
        placed: dict[str, list[tuple[FusedPlace, StoredWeight]]] = defaultdict(list)
        for weight in sorted(weights, key=lambda weight: _natural(weight.name)):
            place = self._scheme.place(weight.name)
            if place is not None and place.name in self._names:
                self._formats[weight.format.label] += 1
                placed[place.name].append((place, weight))
                continue
            name, pattern = (weight.name, None) if rules is None else rules.rename(weight.name)
            if name not in self._names:
                continue
            self._formats[weight.format.label] += 1 if pattern is None else self._experts
            if pattern is not None:
                pieces[name][pattern].append(weight)
            elif name.endswith(".weight") and type(self._modules[name.removesuffix(".weight")]) is nn.Linear:
                self._check(weight, tuple(self._names[name].shape))
                self._linears[name.removesuffix(".weight")] = weight
            elif isinstance(self._modules[name.rpartition(".")[0]], nn.Embedding):
                self._check(weight, tuple(self._names[name].shape))
                self._embeddings[name.removesuffix(".weight")] = weight
            elif self._names[name].dim() == 3:
                self._whole[name] = weight
            else:
                raise self._refusal(weight, f"and {name} is of a {self._class_of(name)}, which must be whole")
        for name, by_pattern in pieces.items():
            assert rules is not None
            self._fused[name] = self._parts(rules, name, by_pattern)
        for name, found in placed.items():
            self._fused[name] = self._placed_parts(name, found)
            self._interleaved.add(name)

    def check_values(self, weights: Iterable[StoredWeight], read: Read) -> None:
        """Check the values of scales, up to `CHECKED_BYTES` of them. They are read one after another, and not kept."""
        left, skipped = CHECKED_BYTES, 0
        for weight in weights:
            for leaf in weight.format.checked:
                entry = weight.tensors.get(leaf)
                if entry is None:
                    continue
                if entry.nbytes > left:
                    skipped += entry.nbytes
                    continue
                left -= entry.nbytes
                problem = weight.format.broken(leaf, read(entry))
                if problem is not None:
                    raise self._refusal(weight, f"({weight.format.label}), but {problem}")
        if skipped:
            logger.warning(
                "%s: %s of scales are used without being checked for NaN", self._source, format_size(skipped)
            )

    def _find_beside(self, rules: KeyRules, entries: Mapping[str, TensorEntry]) -> None:
        """Note the keys of whole tensors that have other names in the model, or are fused from several."""
        fusions: dict[str, Fusion] = {}
        for key in sorted(entries, key=_natural):
            name, pattern = rules.rename(key)
            if name in self._names and pattern is not None:
                if name not in fusions:
                    fusions[name] = rules.fusion(name, pattern)
                fusions[name].add(pattern, entries[key])
            elif name in self._names and name != key:
                self._beside[name] = (FusedPart(key, ()),)
                self._shapes[name] = entries[key].shape
        for name, fusion in fusions.items():
            parts = fusion.parts()
            if parts is not None and len({entries[part.key].shape for part in parts}) == 1:
                self._beside[name] = tuple(parts)
                self._shapes[name] = entries[parts[0].key].shape

    def make(self) -> Published:
        """Replace the modules, and let the model remember its checkpoint."""
        experts: dict[str, list[FusedWeight]] = defaultdict(list)
        added: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, parts in self._fused.items():
            owner, _, leaf = name.rpartition(".")
            experts[owner].append(self._fused_weight(leaf, owner, parts, added[owner]))
        for name, weight in self._whole.items():
            owner, _, leaf = name.rpartition(".")
            experts[owner].append(self._whole_weight(leaf, owner, weight, added[owner]))
        for name, weight in self._linears.items():
            linear = self._modules[name]
            assert isinstance(linear, nn.Linear)
            replaced = QuantizedLinear(linear, weight.format, weight.tensors)
            parent, _, key = name.rpartition(".")
            self._modules[parent]._modules[key] = replaced
            for own, leaf in replaced.stored.items():
                self._sources[f"{name}.{own}"] = (FusedPart(weight.tensors[leaf].name, ()),)
                self._shapes[f"{name}.{own}"] = weight.tensors[leaf].shape
        for name, weight in self._embeddings.items():
            self._become_embedding(name, weight)
        for owner, fused in experts.items():
            self._become_experts(self._modules[owner], tuple(fused), added[owner])
        found = Published(self._scheme.method, dict(self._formats), self._sources, self._shapes, self._beside)
        remember(self._model, found)
        return found

    def _become_embedding(self, name: str, weight: StoredWeight) -> None:
        """Make the embedding `name` a quantised one; linear layers that are tied to it share the stored table."""
        module: Any = self._modules[name]
        table = module._parameters.pop("weight")
        stored = become_embedding(module, table.dtype, weight.format, weight.tensors)
        for own, leaf in stored.items():
            self._sources[f"{name}.{own}"] = (FusedPart(weight.tensors[leaf].name, ()),)
            self._shapes[f"{name}.{own}"] = weight.tensors[leaf].shape
        for other, parameter in self._names.items():
            owner = other.removesuffix(".weight")
            if parameter is not table or owner == name:
                continue
            linear = self._modules[owner]
            if type(linear) is not nn.Linear:
                raise self._refusal(weight, f"and {other}, which is tied to it, is of a {self._class_of(other)}")
            replaced = QuantizedLinear(linear, weight.format, weight.tensors)
            for own in stored:
                replaced._parameters[own] = module._parameters[own]
            parent, _, key = owner.rpartition(".")
            self._modules[parent]._modules[key] = replaced
            ties = getattr(self._model, "all_tied_weights_keys", None) or {}
            ties.pop(other, None)  # there is no such name any more

    def _become_experts(self, module: Any, fused: tuple[FusedWeight, ...], added: Mapping[str, Any]) -> None:
        """Make `module` one of quantised experts, in place: others may refer to it."""
        plain: Any = type(module)
        dtype = module._parameters[fused[0].name].dtype
        module.__class__ = quantized_class(plain)
        module.stored, module.compute_dtype, module.fused = {}, dtype, fused
        for weight in fused:
            del module._parameters[weight.name]
        for published, (shape, kind) in added.items():
            QuantizedExperts.add_stored(module, published, shape, kind)

    def _parts(self, rules: KeyRules, name: str, by_pattern: Mapping[str, list[StoredWeight]]) -> Parts:
        """Return the matrices of the fused tensor `name` with their places, after checking them."""
        weights = {weight.name: weight for found in by_pattern.values() for weight in found}
        first = next(iter(weights.values()))
        whole = tuple(self._names[name].shape)
        shape = (whole[1] // len(by_pattern), whole[2]) if len(whole) == 3 else ()
        supported = shape and hasattr(self._modules[name.rpartition(".")[0]], "num_experts")
        keys = [*weights]
        found_places = self._places_of(rules, name, by_pattern, shape) if supported else ()
        places = [FusedPart(keys[position], index) for position, index in found_places]
        if not places:
            raise self._refusal(first, f"and {name} is made of it in a way that is not supported for stored weights")
        found_parts = len(places) * self._experts
        if found_parts != whole[0] * len(by_pattern):
            raise self._refusal(
                first, f"and only {found_parts} of the {whole[0] * len(by_pattern)} parts of {name} are"
            )
        self._check_alike(weights.values(), first, shape)
        return [(place, weights[place.key]) for place in places]

    def _places_of(
        self, rules: KeyRules, name: str, by_pattern: Mapping[str, list[StoredWeight]], shape: tuple[int, ...]
    ) -> Places:
        """Return the place of each matrix of a fused tensor, with its position among all; none if it is not just made
        of them. It follows from the rule and the shapes, which are those of other layers, too."""
        dtype = self._names[name].dtype
        key = tuple((pattern, len(found)) for pattern, found in by_pattern.items()), shape, dtype
        if key not in self._places:
            fusion = rules.fusion(name, next(iter(by_pattern)))
            positions: dict[str, int] = {}
            for pattern, found in by_pattern.items():
                for weight in found:
                    fusion.add(pattern, TensorEntry(weight.name, dtype, shape, -1, 0))
                    positions.setdefault(weight.name, len(positions))
            self._places[key] = [(positions[part.key], part.index) for part in fusion.parts() or ()]
        return self._places[key]

    def _placed_parts(self, name: str, found: list[tuple[FusedPlace, StoredWeight]]) -> Parts:
        """As `_parts`, for a tensor (experts, in, out) whose matrices the scheme itself places."""
        found = sorted(found, key=lambda each: (each[0].expert, each[0].part))
        (place, first), whole = found[0], tuple(self._names[name].shape)
        every = [(expert, part) for expert in range(whole[0]) for part in range(place.parts)]
        if len(whole) != 3 or [(each.expert, each.part) for each, _ in found] != every:
            raise self._refusal(first, f"and of the {len(every)} parts of {name} others are there, or some are not")
        shape = (whole[2] // place.parts, whole[1])
        self._check_alike((weight for _, weight in found), first, shape)
        rows = next(iter(first.tensors.values())).shape[0]
        return [(FusedPart(w.name, (p.expert, slice(p.part * rows, (p.part + 1) * rows))), w) for p, w in found]

    def _fused_weight(self, leaf: str, owner: str, parts: Parts, added: dict[str, Any]) -> FusedWeight:
        """Return the fused tensor `leaf` of the module `owner`; put shape and dtype of stored ones into `added`."""
        first = parts[0][1]
        experts = int(self._modules[owner].num_experts)
        count = len(parts) * self._experts // experts
        names = {}
        order: Counter[int] = Counter()
        places = []
        for place, weight in parts:
            expert: Any = place.index[0]
            places.append((expert, order[expert], weight))
            order[expert] += 1
        for stored, entry in first.tensors.items():
            names[stored] = _fused_name(leaf, stored)
            rows = entry.shape[0] if entry.shape else 1
            self._sources[f"{owner}.{names[stored]}"] = tuple(
                FusedPart(weight.tensors[stored].name, (expert, slice(number * rows, (number + 1) * rows)))
                for expert, number, weight in places
            )
            self._shapes[f"{owner}.{names[stored]}"] = entry.shape
            added[names[stored]] = (experts, count * rows, *entry.shape[1:]), entry.dtype
        shape = self._names[f"{owner}.{leaf}"].shape
        if f"{owner}.{leaf}" in self._interleaved:
            return FusedWeight(leaf, first.format, count, (shape[2] // count, shape[1]), True, names, True)
        return FusedWeight(leaf, first.format, count, (shape[1] // count, shape[2]), False, names)

    def _whole_weight(self, leaf: str, owner: str, weight: StoredWeight, added: dict[str, Any]) -> FusedWeight:
        """As `_fused_weight`, for a fused tensor that the checkpoint stores fused."""
        whole = tuple(self._names[f"{owner}.{leaf}"].shape)
        transposed = bool(getattr(self._modules[owner], "is_transposed", False))
        shape = (whole[2], whole[1]) if transposed else (whole[1], whole[2])
        experts = whole[0]
        for stored, entry in weight.tensors.items():
            if not entry.shape or entry.shape[0] != experts:
                raise self._refusal(weight, f"but its {stored} has the shape {entry.shape} for {experts} experts")
        self._check(weight, shape, {leaf: _of_one(entry) for leaf, entry in weight.tensors.items()})
        names = {stored: _fused_name(leaf, stored) for stored in weight.tensors}
        for stored, entry in weight.tensors.items():
            self._sources[f"{owner}.{names[stored]}"] = (FusedPart(entry.name, ()),)
            self._shapes[f"{owner}.{names[stored]}"] = entry.shape
            added[names[stored]] = entry.shape, entry.dtype
        return FusedWeight(leaf, weight.format, 1, shape, transposed, names)

    def _check_alike(self, weights: Iterable[StoredWeight], first: StoredWeight, shape: tuple[int, ...]) -> None:
        """Check weights that are computed with as one."""
        layout = _layout(first)
        for weight in weights:
            self._check(weight, shape)
            if weight.format != first.format or _layout(weight) != layout:
                raise self._refusal(weight, f"and {first.name}, which is computed with beside it, is stored otherwise")

    def _check(
        self, weight: StoredWeight, shape: tuple[int, ...], tensors: Mapping[str, TensorEntry] | None = None
    ) -> None:
        assert len(shape) == 2
        found = weight.tensors if tensors is None else tensors
        key = weight.format, shape, _layout_of(found)
        if key not in self._known:
            self._known[key] = weight.format.problem((shape[0], shape[1]), found)
        problem = self._known[key]
        if problem is not None:
            raise self._refusal(weight, f"({shape[0]} x {shape[1]}, {weight.format.label}), but {problem}")

    def _refusal(self, weight: StoredWeight, reason: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self._source}: {weight.name} is stored as {self._scheme.method} {reason}")

    def _class_of(self, name: str) -> str:
        return type(self._modules[name.rpartition(".")[0]]).__name__


Layout = frozenset[tuple[str, tuple[int, ...], torch.dtype]]
"""Leaf, shape and dtype of each tensor of a weight."""


def _layout(weight: StoredWeight) -> Layout:
    return _layout_of(weight.tensors)


def _layout_of(tensors: Mapping[str, TensorEntry]) -> Layout:
    return frozenset((leaf, entry.shape, entry.dtype) for leaf, entry in tensors.items())


def _of_one(entry: TensorEntry) -> TensorEntry:
    """Return the entry of one expert's tensor, given that of all experts."""
    return TensorEntry(entry.name, entry.dtype, entry.shape[1:], entry.offset, entry.nbytes)


def _fused_name(leaf: str, stored: str) -> str:
    """Return the name of the parameter for a stored tensor of the fused tensor `leaf`, as transformers names them."""
    name = leaf + stored.removeprefix("weight") if stored.startswith("weight") else f"{leaf}_{stored}"
    return name.replace(".", "_")


def _natural(name: str) -> list[str | int]:
    """Return a key that orders numbers in names by value; words and numbers take turns in it."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]


_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)")
