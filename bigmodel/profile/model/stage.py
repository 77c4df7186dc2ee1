"""One stage of a causal language model: consecutive layers with what runs before or after them, the others left out.

A stage is the whole model whose layers of other stages are `PassedLayer`s, which hold no weights. Names of modules are
those of the whole model, and its forward takes the same arguments, so the loader, the planner and the dispatcher treat
it as any model. Positions and masks follow from the cache, so a passed layer adds the new tokens to it, which take
no memory there.

What a stage takes is planned with a copy that has its own layers alone, `stage_alone`: fewer to look at, and equal for
all stages of as many layers of the same kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import PlanError
from .units import UnitProfile

_CACHED = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose caches count tokens alone."""


_BESIDE = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""Settings of models whose layers also get an input of their own, or keys and values of other layers."""


class PassedLayer(nn.Module):
    """Stands for a layer of another stage: returns its input.

    Args:
        index: the layer's place in the model and in its cache.
        counts: whether it counts tokens in the cache.

    Attributes:
        exchange: called with the hidden states, and returns those to go on with; None: they are returned as they are.
    """

    def __init__(self, index: int, counts: bool = True) -> None:
        super().__init__()
        self.layer_idx = index
        self.counts = counts
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, past_key_values: Any = None, **__: Any) -> torch.Tensor:
        """Return the hidden states, shape (sequences, tokens, width), and count the tokens in a cache that counts."""
        if self.counts and past_key_values is not None and getattr(past_key_values, "counts_tokens", True):
            # Caches take a tensor without elements for one without tokens: these have one, of no bytes of their own.
            byte = torch.zeros((), dtype=torch.uint8, device=hidden_states.device)
            key = byte.expand(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            past_key_values.update(key, key[..., :0], self.layer_idx)
            layer = past_key_values.layers[self.layer_idx]
            layer.keys = byte.expand(layer.keys.shape)
        return hidden_states if self.exchange is None else self.exchange(hidden_states)


class PassedEmbedding(nn.Module):
    """Stands for the embedding of another stage: its output has the right shape and dtype, and no meaning.

    Args:
        width: size of a hidden state.
        dtype: its dtype.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return zeros of shape (sequences, tokens, width)."""
        return torch.zeros((*input_ids.shape, self.width), dtype=self.dtype, device=input_ids.device)


class PassedHead(nn.Module):
    """Stands for the final norm or the head of another stage: returns its input.

    Attributes:
        exchange: as of `PassedLayer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return hidden_states if self.exchange is None else self.exchange(hidden_states)


PASSED = (PassedLayer, PassedEmbedding, PassedHead)
"""Classes of modules that stand for those of other stages."""


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a causal language model of transformers, in order.

    Raises:
        PlanError: the model is of another kind, or its layers keep states that are no keys and values.
    """
    name = type(model).__name__
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    parts = (getattr(decoder, "embed_tokens", None), getattr(decoder, "norm", None), getattr(model, "lm_head", None))
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(part, nn.Module) for part in parts):
        raise PlanError(
            f"{name} cannot be cut into stages for several nodes: it has no model.embed_tokens, model.layers, "
            "model.norm and lm_head, as decoders of transformers have; plan it for one node"
        )
    beside = [name for name in _BESIDE if getattr(getattr(model, "config", None), name, None)]
    if beside:
        raise PlanError(
            f"{name} cannot be cut into stages for several nodes: its layers get more than hidden states, as "
            f"{' and '.join(beside)} of its config says; plan it for one node"
        )
    kinds = set(getattr(getattr(model, "config", None), "layer_types", None) or ()) - _CACHED
    if kinds:
        raise PlanError(
            f"{name} cannot be cut into stages for several nodes: it has layers of {', '.join(sorted(kinds))}, whose "
            "states count no tokens; plan it for one node"
        )
    return layers


def cut_stage(model: nn.Module, start: int, stop: int) -> nn.Module:
    """Leave only layers `start` to `stop` (excluded) of `model` in place, and return it.

    The embedding stays on the stage of layer 0, final norm and head on that of the last layer; where they share a
    weight, the embedding stays on both.

    Args:
        model: a causal language model, usually on meta; it is changed.
        start: the first layer of the stage.
        stop: the layer behind its last one.

    Raises:
        PlanError: the model cannot be cut, or has no such layers.
    """
    layers = _checked(model, start, stop)
    types = getattr(getattr(model, "config", None), "layer_types", None) or ["full_attention"] * len(layers)
    for index in range(len(layers)):
        if not start <= index < stop:  # masks and positions follow from the first layer of each type
            layers[index] = PassedLayer(index, counts=types[index] not in types[:index])
    return _without_ends(model, start == 0, stop == len(layers))


def stage_alone(model: nn.Module, start: int, stop: int) -> nn.Module:
    """Return a copy on meta of layers `start` to `stop` (excluded) of `model`, with what a stage has beside them.

    It is a model of so many layers, which are numbered from 0; `units_of_whole` names them as the whole model does.

    Args:
        model: a causal language model, usually on meta; not changed.
        start: the first layer of the stage.
        stop: the layer behind its last one.

    Raises:
        PlanError: the model cannot be cut, or has no such layers.
    """
    layers = _checked(model, start, stop)
    known: dict[int, Any] = {id(layer): nn.Identity() for layer in [*layers[:start], *layers[stop:]]}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
        parameter = isinstance(tensor, nn.Parameter) and not tensor.is_meta
        known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
    found: Any = copy.deepcopy(model, known)
    own = nn.ModuleList(list(found.model.layers)[start:stop])
    for module in own.modules():
        for name in _NUMBERS:
            number = getattr(module, name, None)
            if isinstance(number, int):
                setattr(module, name, number - start)
    found.model.layers = own
    config = found.config
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = stop - start
    if types:
        config.layer_types = list(types[start:stop])
    return _without_ends(found, start == 0, stop == len(layers))


_NUMBERS = ("layer_idx", "layer_id", "layer_index")
"""Attributes of modules that are their layer's number."""
_LAYERS = "model.layers."


def units_of_whole(units: tuple[UnitProfile, ...], start: int) -> tuple[UnitProfile, ...]:
    """Return the units of a `stage_alone` under their names in the whole model.

    Args:
        units: units of a stage.
        start: its first layer.
    """
    return tuple(
        replace(
            unit,
            name=_in_whole(unit.name, start),
            tensors=tuple(replace(spec, name=_in_whole(spec.name, start)) for spec in unit.tensors),
            experts=tuple(replace(experts, name=_in_whole(experts.name, start)) for experts in unit.experts),
        )
        for unit in units
    )


def _in_whole(name: str, start: int) -> str:
    if not name.startswith(_LAYERS):
        return name
    number, dot, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(number) + start}{dot}{rest}"


def _checked(model: nn.Module, start: int, stop: int) -> nn.ModuleList:
    layers = layers_of(model)
    if not 0 <= start < stop <= len(layers):
        raise PlanError(f"a stage has layers {start} to {stop} of {len(layers)}: give at least one of them")
    return layers


def _without_ends(model: nn.Module, first: bool, last: bool) -> nn.Module:
    """Leave out the embedding unless the stage is the first, and norm and head unless it is the last."""
    decoder: Any = model.model
    tied = model.lm_head.weight is decoder.embed_tokens.weight  # type: ignore[union-attr]
    if not first and not (last and tied):
        embedding = decoder.embed_tokens
        decoder.embed_tokens = PassedEmbedding(embedding.embedding_dim, embedding.weight.dtype)
    if not last:
        decoder.norm = PassedHead()
        model.lm_head = PassedHead()
        model._tied_weights_keys = {}  # type: ignore[assignment]
    return model
