"""Sounds, time series and images (`image_inputs`) as inputs: candidates of what a model may take.

Where several conventions share a name (an image is a grid of pixels for one model, a list of patches for another) each
is a candidate: the first that the model's forward accepts on fake tensors is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from .image_inputs import image_inputs, image_shape
from .inputs import (
    FINER_SAMPLES,
    IMAGES,
    PATCH,
    SAMPLES,
    SERIES,
    SOUNDS,
    Inputs,
    fields,
    first_field,
    parameters_of,
    sample,
    token_ids,
)

SAMPLES_OF_FRAME = 320
"""Samples of a frame of semantic features beside them: 20 ms at 16 kHz."""


def media_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model other than text, one sample for each sequence."""
    accepted = set(parameters_of(model))
    if accepted.intersection(SERIES):
        yield from series_inputs(model, batch_size)
    if accepted.intersection(IMAGES) and has_encoder(model.config, "vision_config"):
        yield from image_inputs(model, batch_size)
    if accepted.intersection(SOUNDS) and has_encoder(model.config, "audio_config"):
        yield from sound_inputs(model, batch_size)


def robot_inputs(model: nn.Module, batch_size: int, tokens: int) -> Iterator[Inputs]:
    """Yield the inputs of a transformers model that moves a robot: its state, the noise that actions are made of, an
    image of one camera, and a text with a token for each patch of the image beside `tokens` others."""
    config: Any = model.config
    channels, height, width = image_shape(getattr(config, "vlm_config", config))
    patch = first_field(config, PATCH, "patch_size")
    actions = first_field(config, 50, "chunk_size"), first_field(config, 32, "max_action_dim")
    yield {
        "state": sample(batch_size, first_field(config, 32, "max_state_dim")),
        "noise": sample(batch_size, *actions),
        "timestep": sample(batch_size),
        "input_ids": token_ids(config, batch_size, tokens + (height // patch) * (width // patch)),
        "pixel_values": sample(batch_size, 1, channels, height, width),
        "pixel_attention_mask": torch.ones(batch_size, 1, dtype=torch.bool),
    }


def has_encoder(config: Any, name: str) -> bool:
    """Return whether a model has an encoder of images or sounds: a config may leave out one of its architecture's."""
    return getattr(config, name, config) is not None


def sound_shape(config: Any) -> tuple[int, int]:
    """Return mel bands and frames of the sounds for a config."""
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def sound_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model with one sound for each sequence."""
    config: Any = model.config
    accepted = set(parameters_of(model))
    shapes_and_lengths: list[tuple[tuple[int, ...], int]] = []
    if "input_features" in accepted:
        bands, frames = sound_shape(config)
        named = fields(
            config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
            "mel_bins", "n_mels", "input_size", "input_dim", "num_melspec_bins", "feature_dim", "model_in_channels",
        )  # fmt: skip
        positions = [2 * each for each in fields(config, "max_source_positions")]
        positions += [each // 2 * 2 for each in fields(config, "max_position_embeddings") if each < frames]
        shapes_and_lengths = [
            (shape, length)
            for length in dict.fromkeys([frames, *positions, *fields(config, "spec_size", "max_length")])
            for count in dict.fromkeys([bands, *named, 128, 160, *_stacked(config, bands)])
            for shape in ((count, length), (length, count), (1, length, count))
        ]
        for shape, length in shapes_and_lengths:
            yield {"input_features": sample(batch_size, *shape), **_masks(accepted, batch_size, length)}
        # The mask may be one of features that the encoder makes, as Granite Speech's: without, all are used.
        for shape, _ in shapes_and_lengths if _masks(accepted, batch_size, 1) else ():
            yield {"input_features": sample(batch_size, *shape)}
        # A transducer joins each token with what its encoder makes of the sound.
        if {"decoder_input_ids", "decoder_cache"} <= accepted:
            for shape, _ in shapes_and_lengths:
                ids = torch.zeros(batch_size, 1, dtype=torch.long)
                yield {"input_features": sample(batch_size, *shape), "decoder_input_ids": ids}
    name: str | None = next((n for n in ("input_values", "audio_values", "waveform") if n in accepted), None)
    if name is not None:
        shapes: tuple[tuple[int, ...], ...] = (
            (SAMPLES,),
            (1, SAMPLES),
            (FINER_SAMPLES,),
            (1, FINER_SAMPLES),
            (first_field(config, 1024, "max_length"), first_field(config, 128, "num_mel_bins")),
        )
        yield from ({name: sample(batch_size, *shape)} for shape in shapes)
    if name is not None and "input_features" in accepted:  # a codec that takes the samples and what they sound like
        for count in dict.fromkeys(count for shape, _ in shapes_and_lengths for count in shape[-1:]):
            features = sample(batch_size, SAMPLES // SAMPLES_OF_FRAME, count)
            yield {name: sample(batch_size, 1, SAMPLES), "input_features": features}


def _stacked(config: Any, bands: int) -> list[int]:
    """Return features of a frame that consists of several: as many as the config says, or twice and four times those of
    one."""
    return [bands * count for count in (*fields(config, "num_stacked_frames"), 2, 4)]


def _masks(accepted: Collection[str], batch_size: int, length: int) -> Inputs:
    """Return the sound masks that a forward takes, all ones: int64, (batch, frames)."""
    names = [name for name in ("input_features_mask", "feature_attention_mask") if name in accepted]
    return {name: torch.ones(batch_size, length, dtype=torch.long) for name in names}


def series_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model with one time series for each sequence."""
    config: Any = model.config
    length = first_field(config, 512, "context_length")
    lags = max([0, *(getattr(config, "lags_sequence", None) or ())])
    channels = first_field(config, 1, "num_input_channels", "input_size")
    accepted = parameters_of(model)
    extra: Inputs = {}
    if "past_time_features" in accepted:
        extra["past_time_features"] = sample(batch_size, length + lags, first_field(config, 0, "num_time_features"))
        extra["past_observed_mask"] = torch.ones(batch_size, length + lags)
    yield {"past_values": sample(batch_size, length, channels)}
    yield {"past_values": sample(batch_size, length + lags), **extra}
    padded = {"past_values": sample(batch_size, length), "past_values_padding": torch.zeros(batch_size, length)}
    yield padded
    if "freq" in accepted:
        yield {**padded, "freq": torch.zeros(batch_size, 1, dtype=torch.long)}
