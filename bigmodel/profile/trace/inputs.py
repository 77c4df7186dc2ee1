"""The inputs that a model takes, by the conventions of its library: which names, shapes and dtypes.

A transformers model says what it takes by `main_input_name`, `input_modalities`, the parameters of its forward and the
fields of its config; timm and torchvision models by a default size; diffusers models by `config.sample_size`. Where
several conventions share a name (an image is a grid of pixels for one model, a list of patches for another) each is a
candidate: the first that the model's forward accepts on fake tensors is the one.

Whole numbers and masks have values, as forwards decide by them; samples of floating point lie on meta.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import PlanError

Inputs = dict[str, torch.Tensor]
"""Arguments of forward by name."""

IMAGE_SIZES = (224, 512, 1024, 1536)
"""Heights and widths to try for models whose config names none."""

FRAMES, SAMPLES, PATCH = 16, 32000, 16
"""Frames of a video, samples of a sound (two seconds) and pixels of a patch, where a config names none."""


def parse_inputs(texts: Iterable[str]) -> Inputs:
    """Return inputs described in text, as tensors on meta.

    Args:
        texts: as in ``"pixel_values=1x3x224x224"`` or ``"input_ids=1x128:int64"``. Without a dtype ids, masks and other
            whole numbers of transformers models are int64, all else float32, which is taken in the model's dtype.

    Raises:
        PlanError: a text is none of these.
    """
    found: Inputs = {}
    for text in texts:
        matched = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*)(?::(\w+))?", text)
        dtype: Any = None
        if matched is not None:
            whole = matched[1].endswith(WHOLE_NUMBERS)
            dtype = getattr(torch, matched[3], None) if matched[3] else (torch.int64 if whole else torch.float32)
        if matched is None or not isinstance(dtype, torch.dtype):
            raise PlanError(f"input is {text!r}; give NAME=SHAPE or NAME=SHAPE:DTYPE, as in pixel_values=1x3x224x224")
        found[matched[1]] = torch.empty([int(size) for size in matched[2].split("x")], dtype=dtype, device="meta")
    return found


WHOLE_NUMBERS = ("_ids", "_mask", "_thw", "_sizes", "_shapes", "labels", "timestep")
"""Ends of the names of inputs that are whole numbers."""


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward by name."""
    return inspect.signature(model.forward).parameters


def required_of(model: nn.Module) -> list[str]:
    """Return the names of the parameters of a model's forward that have no default."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in parameters_of(model).items() if p.default is p.empty and p.kind in plain]


def main_input(model: nn.Module) -> str | None:
    """Return the name of a transformers model's principal input; None for other models."""
    name: Any = getattr(model, "main_input_name", None)
    return name if name is None or isinstance(name, str) else str(next(iter(name), None))


def fields(config: Any, *names: str) -> list[int]:
    """Return the whole numbers that a config, or one inside it, has under any of `names`, outermost first."""
    found: list[int] = []
    stack, seen = [config], set()
    while stack:
        current = stack.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        settings = current if isinstance(current, Mapping) else getattr(current, "__dict__", {})
        for name in names:
            value = settings.get(name, None if isinstance(current, Mapping) else getattr(current, name, None))
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [each for each in values[-1:] if isinstance(each, int) and not isinstance(each, bool) and each > 0]
        stack += [v for v in settings.values() if isinstance(v, Mapping) or hasattr(v, "model_type")]
    return list(dict.fromkeys(found))


def first_field(config: Any, default: int, *names: str) -> int:
    """Return the first whole number that a config has under any of `names`."""
    return next(iter(fields(config, *names)), default)


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model of this config takes."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or next(iter(fields(config, "image_size")), IMAGE_SIZES[0])
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(vision, "num_channels", 3), height, width


def sound_shape(config: Any) -> tuple[int, int]:
    """Return bands and frames of the sounds that a model of this config takes."""
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def plain_token(config: Any) -> int:
    """Return a token id with no special meaning to a model of this config."""
    special = {value for value in _token_ids(config) if isinstance(value, int)}
    return next(number for number in range(3, 4 + len(special) + 3) if number not in special)


def _token_ids(config: Any) -> Iterator[Any]:
    configs = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    for each in configs:
        for name, value in vars(each).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                yield from value if isinstance(value, (list, tuple)) else [value]


def token_ids(config: Any, batch_size: int, length: int) -> torch.Tensor:
    """Return ids of plain tokens: int64, (batch, length)."""
    return torch.full((batch_size, length), plain_token(config), dtype=torch.long)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a sample without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def image_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield the ways in which a transformers model may take one image (or video) of each sequence."""
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
        if "video" in _modalities(model) and "image" not in _modalities(model):
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
    """Return whether a config, or one inside it, names the size of images."""
    vision = getattr(config, "vision_config", config)
    return bool(getattr(vision, "image_size", None) or fields(config, "image_size"))


def _patches_in_grids(
    config: Any, name: str, grid: str, channels: int, size: tuple[int, int], batch_size: int
) -> Iterator[Inputs]:
    """Yield images as one list of patches, with the rows and columns of each."""
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
    """Yield images as padded lists of patches, with the rows and columns of each."""
    patch = first_field(config, PATCH, "patch_size")
    count = first_field(config, 256, "num_patches", "max_num_patches")
    edge = math.isqrt(count)
    yield {
        "pixel_values": sample(batch_size, edge * edge, channels * patch * patch),
        "pixel_attention_mask": torch.ones(batch_size, edge * edge, dtype=torch.long),
        "spatial_shapes": torch.tensor([[edge, edge]] * batch_size),
    }


def sound_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield the ways in which a transformers model may take one sound of each sequence."""
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
    """Return the masks of sounds that a forward takes, which mask nothing: (batch, frames)."""
    names = [name for name in ("input_features_mask", "feature_attention_mask") if name in accepted]
    return {name: torch.ones(batch_size, length, dtype=torch.long) for name in names}


def series_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield the ways in which a transformers model may take time series."""
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


def _modalities(model: nn.Module) -> tuple[str, ...]:
    found: Any = getattr(model, "input_modalities", ())
    return (found,) if isinstance(found, str) else tuple(found)


def text_inputs(model: nn.Module, batch_size: int, tokens: int) -> Inputs:
    """Return token ids and what a transformers model takes beside each token."""
    config: Any = model.config
    accepted = parameters_of(model)
    length = min(tokens, *fields(config, "max_position_embeddings")[:1] or [tokens]) if tokens else 16
    found = {"input_ids": token_ids(config, batch_size, length)}
    if "bbox" in accepted:
        found["bbox"] = torch.zeros(batch_size, length, 4, dtype=torch.long)
    return found


def media_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield the ways in which a transformers model may take what is not text, one sample of each sequence."""
    accepted = parameters_of(model)
    if "past_values" in accepted:
        yield from series_inputs(model, batch_size)
    sees = {"pixel_values", "pixel_values_videos", "flattened_patches", "grid_thw"} & set(accepted)
    hears = {"input_features", "input_values", "audio_values"} & set(accepted)
    if sees:
        yield from image_inputs(model, batch_size)
    if hears:
        yield from sound_inputs(model, batch_size)


def plain_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs | tuple[torch.Tensor, ...]]:
    """Yield the inputs of a model that is not of transformers, where it follows the conventions of its library."""
    timm: Any = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None)
    size: Any = timm.get("input_size") if isinstance(timm, Mapping) else getattr(timm, "input_size", None)
    if size:
        yield (sample(batch_size, *size),)
    if "sample" in parameters_of(model) and hasattr(model, "config"):
        yield from _diffusers_inputs(model, batch_size)
    if type(model).__module__.startswith("torchvision."):
        edge = getattr(model, "image_size", None) or IMAGE_SIZES[0]
        yield (sample(batch_size, 3, edge, edge),)
        yield (sample(batch_size, 3, FRAMES, edge, edge),)


def _diffusers_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield the inputs of a denoising model, or of an autoencoder, of diffusers."""
    config: Any = model.config
    accepted = parameters_of(model)
    channels = first_field(config, 3, "in_channels")
    edge = first_field(config, 64, "sample_size")
    found: Inputs = {"sample": sample(batch_size, channels, edge, edge)}
    if "timestep" in accepted:
        found["timestep"] = torch.ones(batch_size, dtype=torch.long)
    if "encoder_hidden_states" in accepted:
        width = first_field(config, 768, "cross_attention_dim", "encoder_hid_dim", "joint_attention_dim")
        found["encoder_hidden_states"] = sample(batch_size, 77, width)
    yield found
    if "class_labels" in accepted:
        yield {**found, "class_labels": torch.zeros(batch_size, dtype=torch.long)}
