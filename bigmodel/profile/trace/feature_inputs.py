"""Features that another model has computed, as inputs: of regions of an image, queries, latents, states of an agent.

A forward that takes one of the groups of arguments below takes nothing else that decides its memory. Sizes are those of
the config; a number of features that it does not name is that of the models that were published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from .inputs import FINER_SAMPLES, Inputs, fields, first_field, parameters_of, sample, token_ids

REGIONS = 36
"""Regions of an image that LXMERT's detector finds."""

QUERIES, PATCHES = 32, 257
"""Queries of BLIP-2, and features of its encoder of images: a class and 16 x 16 patches."""

LATENT_FRAMES = 25
"""Frames of two seconds of a codec whose frames are 80 ms long."""

MEL_FRAMES = 200
"""Frames of two seconds of a spectrogram with 10 ms each."""

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def feature_inputs(model: nn.Module, batch_size: int, tokens: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model whose forward takes features; none for other models.

    Args:
        model: A model of transformers.
        batch_size: Sequences.
        tokens: Length of a sequence of features, where the model has no length of its own.
    """
    parameters = parameters_of(model)
    accepted = parameters.keys()
    required = {name for name, each in parameters.items() if each.default is each.empty and each.kind not in _VARIABLE}
    if required == {"inputs_embeds"}:
        yield from _embedded(model.config, batch_size, tokens)
        return
    for names, make in _GROUPS:
        if accepted >= names and "input_ids" not in accepted - names:
            yield from make(model.config, batch_size, tokens)
            return


def _agent(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    """Three tokens for each step of an agent: what it has yet to earn, its state, and its action."""
    positions = first_field(config, 3 * max(tokens, 1), "n_positions")
    steps = max(min(tokens, positions // 3), 1)
    yield {
        "states": sample(batch_size, steps, config.state_dim),
        "actions": sample(batch_size, steps, config.act_dim),
        "rewards": sample(batch_size, steps, 1),
        "returns_to_go": sample(batch_size, steps, 1),
        "timesteps": torch.zeros(batch_size, steps, dtype=torch.long),
        "attention_mask": torch.ones(batch_size, steps, dtype=torch.long),
    }


def _regions(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    length = min(tokens or 16, *fields(config, "max_position_embeddings")[:1] or [tokens or 16])
    yield {
        "input_ids": token_ids(config, batch_size, length),
        "visual_feats": sample(batch_size, REGIONS, config.visual_feat_dim),
        "visual_pos": sample(batch_size, REGIONS, config.visual_pos_dim),
    }


def _queries(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    yield {
        "query_embeds": sample(batch_size, first_field(config, QUERIES, "num_query_tokens"), config.hidden_size),
        "encoder_hidden_states": sample(batch_size, PATCHES, config.encoder_hidden_size),
    }


def _spectrogram(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    yield {
        "audio_mel": sample(batch_size, MEL_FRAMES, config.input_feat_size),
        "audio_mel_mask": torch.zeros(batch_size, MEL_FRAMES, dtype=torch.bool),
    }


def _latents(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    for width in fields(config, "latent_dim", "hidden_size"):
        yield {"latents": sample(batch_size, width, LATENT_FRAMES)}


def _waves(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    """What a codec decodes, or the samples that it encodes."""
    yield {"hidden_states": sample(batch_size, config.hidden_size, LATENT_FRAMES)}
    yield {"hidden_states": sample(batch_size, first_field(config, 1, "channels"), FINER_SAMPLES)}


def _noise(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    """A block of noise that is drafted behind the hidden states of a context."""
    width = config.hidden_size * len(getattr(config, "target_layer_ids", None) or (0,))
    yield {
        "noise_embeds": sample(batch_size, first_field(config, 16, "block_size"), config.hidden_size),
        "context_hidden_states": sample(batch_size, max(tokens, 1), width),
    }


def _embedded(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    yield {"inputs_embeds": sample(batch_size, max(tokens, 1), config.hidden_size)}


def _array(config: Any, batch_size: int, tokens: int) -> Iterator[Inputs]:
    yield {"inputs": sample(batch_size, max(tokens, 1), config.d_model)}


_GROUPS: tuple[tuple[set[str], Callable[[Any, int, int], Iterator[Inputs]]], ...] = (
    ({"states", "actions", "returns_to_go", "timesteps"}, _agent),
    ({"input_ids", "visual_feats", "visual_pos"}, _regions),
    ({"query_embeds", "encoder_hidden_states"}, _queries),
    ({"audio_mel", "audio_mel_mask"}, _spectrogram),
    ({"noise_embeds", "context_hidden_states"}, _noise),
    ({"inputs", "subsampled_output_points"}, _array),
    ({"latents"}, _latents),
    ({"hidden_states", "padding_cache"}, _waves),
)
"""Arguments by which a forward is known to take features, and what makes them."""
