"""Images, sounds and time series as inputs: the shapes that a model may take, and prompts with placeholders for them.

Where several conventions share a name (an image is a grid of pixels for one model, a list of patches for another) each
is a candidate: the first that the model's forward accepts on fake tensors is taken.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .inputs import (
    FRAMES,
    IMAGE_SIZES,
    IMAGES,
    PATCH,
    SAMPLES,
    SERIES,
    SOUNDS,
    Inputs,
    fields,
    first_field,
    modalities,
    parameters_of,
    sample,
    token_ids,
)
from .session import Session
from .values import real_tensors


def media_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model other than text, one sample for each sequence."""
    accepted = set(parameters_of(model))
    if accepted.intersection(SERIES):
        yield from series_inputs(model, batch_size)
    if accepted.intersection(IMAGES):
        yield from image_inputs(model, batch_size)
    if accepted.intersection(SOUNDS):
        yield from sound_inputs(model, batch_size)


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images for a config."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or next(iter(fields(config, "image_size")), IMAGE_SIZES[0])
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(vision, "num_channels", 3), height, width


def sound_shape(config: Any) -> tuple[int, int]:
    """Return mel bands and frames of the sounds for a config."""
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def image_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model with one image or video for each sequence."""
    config: Any = model.config
    accepted = parameters_of(model)
    channels, height, width = image_shape(config)
    sizes = [(height, width)] if _names_size(config) else [(size, size) for size in IMAGE_SIZES]
    sizes += [(size, size) for size in fields(config, "image_size")]
    patches = "pixel_values" if "pixel_values" in accepted else "hidden_states"
    grids = [name for name in ("image_grid_thw", "grid_thw", "image_grid_hws", "grid_hws") if name in accepted]
    if grids:
        yield from _patches_in_grids(config, patches, grids[0], channels, (height, width), batch_size)
    if "spatial_shapes" in accepted:
        yield from _patches_with_shapes(config, channels, batch_size)
    if "aspect_ratio_ids" in accepted:
        tiles = first_field(config, 4, "max_num_tiles")
        yield {
            "pixel_values": sample(batch_size, 1, tiles, channels, height, width),
            "aspect_ratio_ids": torch.ones(batch_size, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.long),
        }
    name = next((n for n in ("pixel_values", "pixel_values_videos", "flattened_patches") if n in accepted), None)
    if name is None:
        return
    frames = first_field(config, FRAMES, "num_frames", "frames_per_clip")
    for high, wide in dict.fromkeys(sizes):
        extras: list[Inputs] = [{}]
        if "image_sizes" in accepted:
            extras.append({"image_sizes": torch.tensor([[high, wide]] * batch_size)})
        shapes = [(channels, high, wide), (1, channels, high, wide), (frames, channels, high, wide)]
        shapes += [(channels, frames, high, wide), (2, channels, high, wide), (5, channels, high, wide)]
        if "video" in modalities(model) and "image" not in modalities(model):
            shapes.insert(0, shapes.pop(2))
        for extra in extras:
            yield from ({name: sample(batch_size, *shape), **extra} for shape in shapes)
    if name == "flattened_patches":
        size = first_field(config, PATCH, "patch_size")
        values = first_field(config, channels * size * size, "patch_embed_hidden_size")
        count = first_field(config, 2048, "max_patches", "seq_len")
        yield {name: sample(batch_size, count, values + 2), "attention_mask": torch.ones(batch_size, count)}
        yield {name: sample(batch_size, count, 2 + channels * size * size)}


def _names_size(config: Any) -> bool:
    """Return whether a config, or one nested in it, names the size of images."""
    vision = getattr(config, "vision_config", config)
    return bool(getattr(vision, "image_size", None) or fields(config, "image_size"))


def _patches_in_grids(
    config: Any, name: str, grid: str, channels: int, size: tuple[int, int], batch_size: int
) -> Iterator[Inputs]:
    """Yield images as one list of patches, with the rows and columns of each image."""
    patch = first_field(config, PATCH, "patch_size")
    merge = first_field(config, 2, "spatial_merge_size", "merge_size", "merge_kernel_size")
    temporal = first_field(config, 1, "temporal_patch_size")
    rows, columns = (max(merge, edge // patch // merge * merge) for edge in size)
    whole = [rows, columns] if "hws" in grid else [1, rows, columns]
    grids = {grid: torch.tensor([whole] * batch_size)}
    if grid == "grid_thw":
        grids["merge_sizes"] = torch.full((batch_size,), merge)
    count = batch_size * rows * columns
    for shape in (
        (channels * temporal * patch * patch,),
        (channels * patch * patch,),
        (channels, patch, patch),
        (first_field(config, 1024, "hidden_size"),),
    ):
        yield {name: sample(count, *shape), **grids}


def _patches_with_shapes(config: Any, channels: int, batch_size: int) -> Iterator[Inputs]:
    """Yield images as padded lists of patches, with the rows and columns of each image."""
    patch = first_field(config, PATCH, "patch_size")
    count = first_field(config, 256, "num_patches", "max_num_patches")
    edge = math.isqrt(count)
    yield {
        "pixel_values": sample(batch_size, edge * edge, channels * patch * patch),
        "pixel_attention_mask": torch.ones(batch_size, edge * edge, dtype=torch.long),
        "spatial_shapes": torch.tensor([[edge, edge]] * batch_size),
    }


def sound_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model with one sound for each sequence."""
    config: Any = model.config
    accepted = parameters_of(model)
    if "input_features" in accepted:
        bands, frames = sound_shape(config)
        named = fields(
            config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
            "mel_bins", "n_mels", "input_size", "input_dim", "num_melspec_bins", "feature_dim", "model_in_channels",
        )  # fmt: skip
        positions = [2 * each for each in fields(config, "max_source_positions")]
        for length in dict.fromkeys([frames, *positions, *fields(config, "spec_size", "max_length")]):
            for count in dict.fromkeys([bands, *named, 128, 160]):
                for shape in ((count, length), (length, count), (1, length, count)):
                    yield {"input_features": sample(batch_size, *shape), **_masks(accepted, batch_size, length)}
    name = next((n for n in ("input_values", "audio_values", "waveform") if n in accepted), None)
    if name is not None:
        shapes: tuple[tuple[int, ...], ...] = (
            (SAMPLES,),
            (1, SAMPLES),
            (first_field(config, 1024, "max_length"), first_field(config, 128, "num_mel_bins")),
        )
        yield from ({name: sample(batch_size, *shape)} for shape in shapes)


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
    yield {"past_values": sample(batch_size, length), "past_values_padding": torch.zeros(batch_size, length)}


@dataclass(frozen=True)
class Prompt:
    """A prompt with images or sounds.

    Attributes:
        ids: token ids, with a placeholder for each feature of an image or sound.
        media: the other inputs, as fake tensors.
    """

    ids: torch.Tensor
    media: Mapping[str, torch.Tensor]

    @classmethod
    def with_media(cls, session: Session, config: Any, media: Mapping[str, torch.Tensor]) -> Prompt:
        """Return a prompt of the workload's length with a placeholder for each feature of `media`."""
        work, length = session.workload, session.workload.prompt_length
        ids = media.get("input_ids")
        fake = session.fake({name: value for name, value in media.items() if name != "input_ids"}, session.dtype)
        if ids is not None and ids.device.type != "meta":
            return cls(ids.detach().cpu(), fake)
        length = length if ids is None else ids.shape[1]
        count, placeholder = 0, None
        for kind, names in PLACEHOLDERS.items():
            look: Any = getattr(session.model, f"get_{kind}_features", None)
            taken = inspect.signature(look).parameters if look is not None else {}
            if look is not None and set(media) & set(taken) and placeholder is None:
                placeholder = next(iter(fields(config, *names)), None)
                features = _features(look(**{name: value for name, value in fake.items() if name in taken}))
                count = sum(tensor.shape[:-1].numel() for tensor in features) // work.batch_size
        with real_tensors():
            ids = token_ids(config, work.batch_size, max(length, count + 2))
            if placeholder is not None:
                ids[:, 1 : 1 + count] = placeholder
                kinds = (ids == placeholder).long()
        kinds_name = next(filter(session.accepts, ("mm_token_type_ids", "token_type_ids")), None)
        if placeholder is not None and kinds_name is not None:
            fake = {**fake, kinds_name: session.fake(kinds)}
        return cls(ids, fake)


PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Config fields that name the placeholder token of each kind of media."""


def _features(found: Any) -> list[torch.Tensor]:
    """Return the feature tensors in the output of `get_image_features` or its like."""
    if hasattr(found, "pooler_output"):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
