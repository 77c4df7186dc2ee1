"""Images and videos as inputs of transformers models: layouts of their pixels, and what goes with them.

Pixels come as whole images, as tiles of images, or as lists of patches with the rows and columns of each image. Beside
them a forward may take masks, sizes, a second resolution, or a text for the encoder of images. Which of them a model
takes is read from the names of its arguments; sizes come from its config.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from .inputs import FRAMES, IMAGE_SIZES, PATCH, Inputs, fields, first_field, modalities, parameters_of, sample

IMAGE_TEXT = 16
"""Tokens of a text that an encoder of images is given."""


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images for a config."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or next(iter(fields(config, "image_size")), IMAGE_SIZES[0])
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(vision, "num_channels", 3), height, width


def image_inputs(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield candidate inputs of a transformers model with one image or video for each sequence."""
    config: Any = model.config
    accepted = parameters_of(model).keys()
    for pixels in _layouts(model, batch_size):
        for companions in _companions(config, accepted, pixels, batch_size):
            yield {**pixels, **companions}


def _layouts(model: nn.Module, batch_size: int) -> Iterator[Inputs]:
    """Yield layouts of pixels, with the inputs that say how they are laid out."""
    config: Any = model.config
    accepted = parameters_of(model)
    channels, height, width = image_shape(config)
    patches = "pixel_values" if "pixel_values" in accepted else "hidden_states"
    grids = [name for name in GRIDS if name in accepted]
    if grids:
        yield from _patches_in_grids(config, patches, grids[0], channels, (height, width), batch_size)
    if "spatial_shapes" in accepted:
        yield from _patches_with_shapes(config, channels, batch_size)
    places = next((name for name in PLACES if name in accepted), None)
    if places is not None:
        yield from _patches_with_places(config, places, channels, batch_size)
    if "image_token_pooling" in accepted:
        yield from _pooled_crops(config, channels, batch_size)
    if "aspect_ratio_ids" in accepted:
        tiles = first_field(config, 4, "max_num_tiles")
        yield {
            "pixel_values": sample(batch_size, 1, tiles, channels, height, width),
            "aspect_ratio_ids": torch.ones(batch_size, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.long),
        }
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if pinpoints and "image_sizes" in accepted:
        yield _largest_tiling(pinpoints, channels, height, batch_size)
    name = next((n for n in ("pixel_values", "pixel_values_videos", "flattened_patches") if n in accepted), None)
    if name is None:
        return
    yield from _whole_images(model, name, batch_size)
    patch = first_field(config, PATCH, "patch_size")
    if name == "flattened_patches":
        values = first_field(config, channels * patch * patch, "patch_embed_hidden_size")
        count = first_field(config, 2048, "max_patches", "seq_len")
        yield {name: sample(batch_size, count, values + 2), "attention_mask": torch.ones(batch_size, count)}
        yield {name: sample(batch_size, count, 2 + channels * patch * patch)}
    elif name == "pixel_values":
        yield {name: sample(batch_size, (height // patch) * (width // patch), channels * patch * patch)}


GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hws", "grid_hws", "image_grid_hw")
"""Inputs that hold the rows and columns of patches of each image; with a "t", the frames before them."""

PLACES = ("image_position_ids", "pixel_position_ids")
"""Inputs that hold the column and row of each patch."""

LIKE_PIXELS = ("prompt_pixel_values", "prompt_masks")
"""Inputs of the shape of the images: an image and its mask as an example of what to do."""


def _whole_images(model: nn.Module, name: str, batch_size: int) -> Iterator[Inputs]:
    """Yield images, several images of each sequence, and videos."""
    config: Any = model.config
    channels, height, width = image_shape(config)
    sizes = [(height, width)] if _names_size(config) else [(size, size) for size in IMAGE_SIZES]
    sizes += [(size, size) for size in fields(config, "image_size")]
    more = (*_sizes_by_patches(config), *_sizes_by_scales(config), *_sizes_by_windows(config))
    sizes += [(size, size) for size in more]
    frames = first_field(config, FRAMES, "num_frames", "frames_per_clip")
    patch = first_field(config, PATCH, "patch_size")
    for high, wide in dict.fromkeys(sizes):
        extras: list[Inputs] = [{}]
        if "image_sizes" in parameters_of(model):
            extras.append({"image_sizes": torch.tensor([[high, wide]] * batch_size)})
        if "target_sizes" in parameters_of(model):  # in patches
            extras.append({"target_sizes": torch.tensor([[high // patch, wide // patch]] * batch_size)})
        shapes = [(channels, high, wide), (1, channels, high, wide), (frames, channels, high, wide)]
        shapes += [(channels, frames, high, wide), (2, channels, high, wide), (5, channels, high, wide)]
        if "video" in modalities(model) and "image" not in modalities(model):
            shapes.insert(0, shapes.pop(2))
        for extra in extras:
            yield from ({name: sample(batch_size, *shape), **extra} for shape in shapes)


def _names_size(config: Any) -> bool:
    """Return whether a config, or one nested in it, names the size of images."""
    vision = getattr(config, "vision_config", config)
    return bool(getattr(vision, "image_size", None) or fields(config, "image_size"))


def _sizes_by_patches(config: Any) -> list[int]:
    """Return the image sizes of a projector that knows certain numbers of patches only, the largest first."""
    known = getattr(config, "projector_patch_to_query_dict", None) or {}
    patch = first_field(config, PATCH, "patch_size")
    return [math.isqrt(int(count)) * patch for count in sorted(known, key=int, reverse=True)]


def _sizes_by_scales(config: Any) -> list[int]:
    """Return the size of images that a model also cuts into patches when they are scaled down."""
    ratios = getattr(config, "scaled_images_ratios", None)
    return [round(first_field(config, PATCH, "patch_size") / min(ratios))] if ratios else []


def _sizes_by_windows(config: Any) -> list[int]:
    """Return the sizes that the config names, enlarged so that as many windows as it says divide the patches."""
    windows = fields(config, "num_windows_side", "num_windows")[:1]
    edges = [count * first_field(config, PATCH, "patch_size") for count in windows]
    return [math.ceil(size / edge) * edge for edge in edges for size in fields(config, "image_size")]


def _largest_tiling(pinpoints: Collection[Any], channels: int, edge: int, batch_size: int) -> Inputs:
    """Return images of the largest resolution that a model cuts into tiles: a small image of the whole, and the
    tiles."""
    high, wide = max(pinpoints, key=math.prod)
    tiles = math.ceil(high / edge) * math.ceil(wide / edge)
    return {
        "pixel_values": sample(batch_size, 1 + tiles, channels, edge, edge),
        "image_sizes": torch.tensor([[high, wide]] * batch_size),
    }


def _patches_in_grids(
    config: Any, name: str, grid: str, channels: int, size: tuple[int, int], batch_size: int
) -> Iterator[Inputs]:
    """Yield images as one list of patches, with the rows and columns of each image."""
    patch = first_field(config, PATCH, "patch_size")
    merge = first_field(config, 2, "spatial_merge_size", "merge_size", "merge_kernel_size")
    temporal = first_field(config, 1, "temporal_patch_size", "patch_temporal")
    rows, columns = (max(merge, edge // patch // merge * merge) for edge in size)
    whole = [1, rows, columns] if grid.endswith("thw") else [rows, columns]
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


def _patches_with_places(config: Any, name: str, channels: int, batch_size: int) -> Iterator[Inputs]:
    """Yield images as padded lists of patches, with the column and row of each patch. As many tokens are left of them
    as the config names."""
    patch = first_field(config, PATCH, "model_patch_size", "patch_size")
    pooled = first_field(config, 1, "pooling_kernel_size")
    for patch_size, pool in dict.fromkeys([(patch, 1), (first_field(config, PATCH, "patch_size"), pooled)]):
        edge = math.isqrt(first_field(config, 280, "default_output_length", "num_soft_tokens")) * pool
        places = torch.stack(torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="xy"), -1)
        yield {
            "pixel_values": sample(batch_size, edge * edge, channels * patch_size * patch_size),
            name: places.reshape(1, edge * edge, 2).repeat(batch_size, 1, 1),
        }


def _pooled_crops(config: Any, channels: int, batch_size: int) -> Iterator[Inputs]:
    """Yield images as crops of patches, with the patches that each token is pooled of: four for each."""
    patch = first_field(config, PATCH, "patch_size")
    _, height, width = image_shape(config)
    rows, columns = height // patch, width // patch
    places = torch.arange(rows * columns).reshape(rows, columns)[: rows // 2 * 2, : columns // 2 * 2]
    pooled = places.unfold(0, 2, 2).unfold(1, 2, 2).reshape(-1, 4)
    starts = torch.arange(batch_size).repeat_interleave(len(pooled))[:, None] * rows * columns
    yield {
        "pixel_values": sample(batch_size, rows * columns, channels * patch * patch),
        "image_token_pooling": pooled.repeat(batch_size, 1) + starts,
        "image_grids": torch.tensor([[rows // 2, columns // 2, 0, 0]] * batch_size),
        "image_num_crops": torch.ones(batch_size, dtype=torch.long),
    }


def _companions(config: Any, accepted: Collection[str], pixels: Inputs, batch_size: int) -> Iterator[Inputs]:
    """Yield candidates of what goes with pixels and does not say how they are laid out."""
    values = next(iter(pixels.values()))
    needed: Inputs = {}
    if "qformer_input_ids" in accepted:
        needed["qformer_input_ids"] = torch.ones(batch_size, IMAGE_TEXT, dtype=torch.long)
    if "task_inputs" in accepted:
        needed["task_inputs"] = torch.ones(batch_size, first_field(config, 77, "task_seq_len"), dtype=torch.long)
    needed.update({name: sample(*values.shape) for name in LIKE_PIXELS if name in accepted})
    if "high_res_pixel_values" in accepted:
        _, high, wide = image_shape(getattr(config, "high_res_vision_config", config))
        needed["high_res_pixel_values"] = sample(batch_size, values.shape[1], high, wide)
    if "image_merge_sizes" in accepted and "image_grid_thw" in pixels:
        merge = first_field(config, 2, "spatial_merge_size", "merge_size")
        needed["image_merge_sizes"] = torch.full((batch_size,), merge)
        yield {**needed, "image_merge_sizes": torch.ones(batch_size, dtype=torch.long)}
    yield needed
    mask = next((name for name in ("pixel_attention_mask", "pixel_mask") if name in accepted), None)
    if mask is None or mask in pixels or values.dim() < 4:
        return
    images, size = values.shape[:-3], values.shape[-2:]
    for shape in ((*images, *size), images):
        yield {**needed, mask: torch.ones(shape, dtype=torch.bool)}
