"""Inputs of diffusers models: denoising transformers and U-Nets, and autoencoders with their encoder and decoder.

Their forwards share names: latents are `sample` or `hidden_states`, texts `encoder_hidden_states`. Latents are a grid
of an image or a video, or a packed list of patches. Configs do not say which, and not all say how large. Each reading
is a candidate: the first that the model's forward accepts on fake tensors is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from .inputs import first_field, parameters_of, sample
from .session import Session

IMAGE_TOKENS = (64, 64)
"""Rows and columns of packed patches for configs that name none: those of an image of 1024 x 1024."""

VIDEO = (21, 60, 104)
"""Frames, rows and columns of a video's latents for configs that name none: five seconds of 480 x 832."""

PACKED_VIDEO = (21, 15, 26)
"""Frames, rows and columns of a video's packed patches: of the same video, compressed four times as much."""

VIDEO_FRAMES = 17
"""Frames of a video for autoencoders: many work on so many at a time."""

TEXT_LENGTH = {"sample": 77, "hidden_states": 512}
"""Tokens of a text for configs that name no number, by the name of the latents."""

TEXT_WIDTHS = (
    "encoder_hid_dim", "caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "cap_feat_dim",
    "cross_attention_dim", "in_text_dim",
)  # fmt: skip
"""Config fields that name the width of texts; of several, the first is meant."""

PLACES = {"img_ids", "img_shapes", "num_frames"}
"""Arguments that say where packed patches belong."""

TIMES = ("timestep", "r_timestep", "timestep_r")

MASKS = ("encoder_attention_mask", "encoder_hidden_states_mask", "text_embedding_mask")


PIXELS = 8
"""Pixels of an image along each edge of a latent, for images that a model is given beside latents and configs that do
not say."""


def diffusion_inputs(model: nn.Module, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield candidate inputs of a diffusers model; none for other models."""
    accepted = parameters_of(model)
    name = next((name for name in TEXT_LENGTH if name in accepted), None)
    if name is None or not hasattr(model, "config"):
        return
    latents = _packed(model, batch_size) if accepted.keys() & PLACES else []
    if "visual_rope_pos" in accepted:
        latents.append(_with_axes(model, batch_size))
    latents += [({name: sample(batch_size, *shape)}, shape[-2] * shape[-1]) for shape in _grids(model, name)]
    for (found, patches), conditions in product(latents, _conditions(model, name, batch_size)):
        for controls in _controls(model, found[name]):
            yield {**found, **_for_each_frame(model, conditions, found[name]), **controls, **_rotation(model, patches)}


def use_autoencoder(session: Session, pixels: torch.Tensor, phase: str) -> None:
    """Record the encoder of an autoencoder, and its decoder on what it returned, as forwards of their own.

    Args:
        session: the fake model, with methods `encode` and `decode`.
        pixels: a fake input of its forward.
        phase: name of the phases.
    """
    model: Any = session.model
    found: list[torch.Tensor] = []

    def encode() -> None:
        encoded = session.recorder.call(lambda: model.encode(pixels), pixels)
        distribution = getattr(encoded, "latent_dist", None)
        latents = distribution.mode() if distribution is not None else next(iter(encoded.values()))
        found.append(latents)

    def decode() -> None:
        session.recorder.call(lambda: model.decode(found[0]), found)

    session.phase(phase, 1, encode)
    session.phase(phase, 1, decode)


def has_both_ways(model: nn.Module) -> bool:
    """Return whether a model is an autoencoder of diffusers, whose encoder and decoder are called by themselves."""
    return all(callable(getattr(model, name, None)) for name in ("encode", "decode")) and hasattr(model, "config")


def _packed(model: nn.Module, batch_size: int) -> list[tuple[dict[str, Any], int]]:
    """Return latents as a list of patches with their places, and the number of patches."""
    config: Any = model.config
    accepted = parameters_of(model)
    frames, rows, columns = PACKED_VIDEO if "num_frames" in accepted else (1, *IMAGE_TOKENS)
    count = frames * rows * columns
    found: dict[str, Any] = {"hidden_states": sample(batch_size, count, first_field(config, 64, "in_channels"))}
    if "num_frames" in accepted:
        found |= {"num_frames": frames, "height": rows, "width": columns}
    elif "img_ids" in accepted:
        axes = len(getattr(config, "axes_dims_rope", None) or range(3))
        found["img_ids"] = sample(count, axes)
        found["txt_ids"] = sample(_text_length(config, "hidden_states"), axes)
    else:
        found["img_shapes"] = [[(1, rows, columns)]] * batch_size
    return [(found, count)]


def _with_axes(model: nn.Module, batch_size: int) -> tuple[dict[str, Any], int]:
    """Return latents of a video with the channels last, with the positions of patches along each axis and of the text's
    tokens, and the number of patches."""
    config: Any = model.config
    channels = first_field(config, 4, "in_visual_dim")
    if getattr(config, "visual_cond", False):
        channels = 2 * channels + 1
    patch = getattr(config, "patch_size", (1, 2, 2))
    axes = [size // edge for size, edge in zip(VIDEO, patch, strict=True)]
    found: dict[str, Any] = {
        "hidden_states": sample(batch_size, *VIDEO, channels),
        "visual_rope_pos": [torch.arange(size) for size in axes],
        "text_rope_pos": torch.arange(_text_length(config, "hidden_states")),
    }
    return found, math.prod(axes)


def _grids(model: nn.Module, name: str) -> Iterator[tuple[int, ...]]:
    """Yield shapes of latents without the batch: of a sound (channels, samples), of an image (channels, rows, columns)
    or of a video."""
    config: Any = model.config
    channels = _latent_channels(model, 3 if name == "sample" else 4)
    edge = first_field(config, 64, "sample_size")
    if _convolves(model, nn.Conv1d) and not _convolves(model, nn.Conv2d, nn.Conv3d):
        yield channels, edge
    frames, rows, columns = VIDEO
    rows, columns = first_field(config, rows, "sample_height"), first_field(config, columns, "sample_width")
    named = first_field(config, 0, "sample_frames")
    if named:
        frames = (named - 1) // first_field(config, 4, "temporal_compression_ratio") + 1
    image, video = (channels, edge, edge), (frames, rows, columns)
    if has_both_ways(model):
        video = (VIDEO_FRAMES, 8 * rows, 8 * columns)
    elif first_field(config, 0, "sample_size"):
        video = (first_field(config, frames, "num_frames"), edge, edge)
    videos = [(channels, *video), (video[0], channels, *video[1:])]
    in_time = _convolves(model, nn.Conv3d) or named
    yield from [*videos, image] if in_time else [image, *videos]


def _latent_channels(model: nn.Module, default: int) -> int:
    """Return the channels of latents: those that the config names, else those that the first convolution reads."""
    reads = (getattr(child, "in_channels", 0) for name, child in model.named_children() if name.endswith("conv_in"))
    return first_field(model.config, 0, "in_channels") or next(filter(None, reads), default)


def _convolves(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _conditions(model: nn.Module, name: str, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield candidates of what latents are denoised by: time, text, classes, sizes."""
    config: Any = model.config
    accepted = parameters_of(model)
    length, width = _text_length(config, name), first_field(config, 768, *TEXT_WIDTHS)
    ones = torch.ones(batch_size, length, dtype=torch.long)
    known: dict[str, Any] = {
        **dict.fromkeys(TIMES, torch.ones(batch_size, dtype=torch.long)),
        "encoder_hidden_states": sample(batch_size, length, width),
        "pooled_projections": sample(batch_size, first_field(config, 768, "pooled_projection_dim", "in_text_dim2")),
        **dict.fromkeys(MASKS, ones),
    }
    if "encoder_hidden_states_t5" in accepted:
        other = first_field(config, 256, "text_len_t5")
        wide = first_field(config, 2048, "cross_attention_dim_t5")
        known["encoder_hidden_states"] = sample(batch_size, length, first_field(config, 1024, "cross_attention_dim"))
        known["encoder_hidden_states_t5"] = sample(batch_size, other, wide)
        known["text_embedding_mask_t5"] = torch.ones(batch_size, other, dtype=torch.long)
        known["image_meta_size"] = sample(batch_size, 6)
        known["style"] = torch.zeros(batch_size, dtype=torch.long)
    if getattr(config, "guidance_embeds", False):
        known["guidance"] = sample(batch_size)
    if getattr(config, "image_dim", None):
        known["encoder_hidden_states_image"] = sample(batch_size, 257, config.image_dim)
    known.update({name: torch.ones(batch_size, 2) for name in ("original_size", "target_size", "crop_coords")})
    added = _added(config, batch_size)
    if added is not None:
        known["added_cond_kwargs"] = added
    if "added_time_ids" in accepted:
        wide = first_field(config, 768, "projection_class_embeddings_input_dim")
        known["added_time_ids"] = sample(
            batch_size, max(wide // first_field(config, 256, "addition_time_embed_dim"), 1)
        )
    found = {key: value for key, value in known.items() if key in accepted}
    labels = {"class_labels": torch.zeros(batch_size, dtype=torch.long)} if "class_labels" in accepted else {}
    yield found
    if labels:
        yield {**found, **labels}
    if not found.keys().isdisjoint(MASKS):
        yield {key: value for key, value in found.items() if key not in MASKS}


def _controls(model: nn.Module, latents: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield candidates of what steers a model beside its conditions: an image, other latents, a mask of pixels."""
    config: Any = model.config
    accepted = parameters_of(model)
    batch_size, size = latents.shape[0], [_pixels(config) * edge for edge in latents.shape[-2:]]
    found: dict[str, Any] = {}
    if "padding_mask" in accepted:
        found["padding_mask"] = sample(1, 1, *size)
    if "control_hidden_states" in accepted:
        channels = first_field(config, latents.shape[1], "vace_in_channels")
        found["control_hidden_states"] = sample(batch_size, channels, *latents.shape[2:])
    if "controlnet_cond" not in accepted:
        yield found
        return
    channels = first_field(config, 3, "conditioning_channels", "ctrl_conditioning_channels")
    extra = first_field(config, 0, "extra_conditioning_channels")
    shapes = [(channels, *latents.shape[2:-2], *size), tuple(latents.shape[1:])]
    shapes.append((latents.shape[1] + extra, *latents.shape[2:]))
    for shape in shapes:
        mask = {"conditioning_mask": sample(batch_size, 1, *shape[1:])} if "conditioning_mask" in accepted else {}
        yield {**found, "controlnet_cond": sample(batch_size, *shape), **mask}


def _pixels(config: Any) -> int:
    """Return the pixels along each edge of a latent of an image that is given beside latents: a model that embeds it
    halves it after each of its blocks but the last."""
    names = ("conditioning_embedding_out_channels", "ctrl_conditioning_embedding_out_channels")
    blocks = next((found for name in names if (found := getattr(config, name, None))), None)
    return PIXELS if blocks is None else 2 ** (len(blocks) - 1)


def _for_each_frame(model: nn.Module, conditions: dict[str, Any], latents: torch.Tensor) -> dict[str, Any]:
    """Return conditions with a text for each frame, for models that add motion to a model of images."""
    text: Any = conditions.get("encoder_hidden_states")
    if text is None or latents.dim() < 5 or not getattr(model.config, "motion_max_seq_length", None):
        return conditions
    return {**conditions, "encoder_hidden_states": sample(text.shape[0] * latents.shape[2], *text.shape[1:])}


def _added(config: Any, batch_size: int) -> dict[str, Any] | None:
    """Return further conditions that some models take in a dict: the pooled text, sizes of the image; None if none."""
    if getattr(config, "addition_embed_type", None) == "text_time":
        each = first_field(config, 256, "addition_time_embed_dim")
        whole = first_field(config, 2816, "projection_class_embeddings_input_dim")
        return {"text_embeds": sample(batch_size, whole - 6 * each), "time_ids": sample(batch_size, 6)}
    if getattr(config, "norm_type", None) == "ada_norm_single":
        additional = getattr(config, "use_additional_conditions", None)
        if additional is None:
            additional = first_field(config, 0, "sample_size") == 128
        values = (sample(batch_size, 2), sample(batch_size, 1)) if additional else (None, None)
        return dict(zip(("resolution", "aspect_ratio"), values, strict=True))
    return None


def _rotation(model: nn.Module, positions: int) -> dict[str, Any]:
    """Return cosines and sines of the positions of patches, for models that are given them."""
    config: Any = model.config
    if "image_rotary_emb" not in parameters_of(model) or "guidance" in parameters_of(model):
        return {}
    patch = first_field(config, 2, "patch_size")
    width = first_field(config, 64, "attention_head_dim")
    count = positions // patch**2 * _frames(config)
    return {"image_rotary_emb": (sample(count, width), sample(count, width))}


def _frames(config: Any) -> int:
    named = first_field(config, 0, "sample_frames")
    return (named - 1) // first_field(config, 4, "temporal_compression_ratio") + 1 if named else 1


def _text_length(config: Any, name: str) -> int:
    return first_field(config, TEXT_LENGTH[name], "max_sequence_length", "max_text_seq_length", "text_len")
