"""The inputs of a model by the conventions of its library: names, shapes and dtypes.

A transformers model declares its inputs by `main_input_name`, `input_modalities`, the parameters of its forward and the
fields of its config; timm and torchvision models by a default size; diffusers models as in `diffusion_inputs`.

Integer inputs and masks have values, because control flow depends on them; floating point samples lie on meta. Images,
sounds and time series of transformers models are in `media_inputs`.

Shorter sequences of a batch are filled up, and a mask says where; so may be a single one, to a length that is common to
all calls. Without padding, models of transformers leave the mask out, and kernels that need none take less memory. A
plan has to hold for both, so forwards are recorded with padding, too.

The sizes of the arguments of a forward tell which calls take no more than one that memory was planned for. A call is
covered by another if each of its arguments is: a tensor by one of as many dimensions, each at least as long, of
elements at least as large; a number or a flag by one that is no smaller; and what is left out, None, False or 0 by
anything. Texts and floating point numbers are not compared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...devices.nested import tensors_in
from ...errors import PlanError

Inputs = dict[str, torch.Tensor]
"""Arguments of forward by name."""

Extent = tuple[int, ...]
"""Of a tensor: its shape and the bytes of an element; of a number or a flag: its value."""

InputSizes = Mapping[str, tuple[Extent, ...]]
"""Extents of the tensors and numbers in each argument of a call, by the argument's name."""

LABELS = "labels"
"""Argument for which a forward returns a loss."""

MASK = "attention_mask"
"""Argument of a forward that says which tokens of a text, or samples of a sound, are not padding."""

SEQUENCES = ("input_ids", "input_values")
"""Inputs that `MASK` is about: tokens of texts, samples of sounds."""

IMAGE_SIZES = (224, 512, 1024, 1536)
"""Heights and widths to try if the config names none."""

FRAMES, SAMPLES, PATCH = 16, 32000, 16
"""Frames of a video, samples of a sound (two seconds) and pixels of a patch, for configs that name none."""

FINER_SAMPLES = 48000
"""Samples of a sound of two seconds at 24 kHz: of codecs whose frames are 80 ms long, 25 frames."""

TEXT = ("input_ids", "inputs_embeds")
"""Text inputs of transformers models."""

IMAGES = ("pixel_values", "pixel_values_videos", "flattened_patches", "grid_thw")
"""Image and video inputs; each model that has any takes one of these."""

SOUNDS = ("input_features", "input_values", "audio_values")
"""Sound inputs."""

SERIES = ("past_values",)
"""Time series inputs."""


def parse_inputs(texts: Iterable[str]) -> Inputs:
    """Return inputs described in text, as tensors on meta.

    Args:
        texts: as in ``"pixel_values=1x3x224x224"`` or ``"input_ids=1x128:int64"``. Without a dtype, ids, masks and
            other integer inputs of transformers models are int64, all others float32, later cast to the model's dtype.

    Raises:
        PlanError: a text has another form.
    """
    found: Inputs = {}
    for text in texts:
        matched = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*)(?::(\w+))?", text)
        dtype: Any = None
        if matched is not None:
            integer = matched[1].endswith(INTEGER_SUFFIXES)
            dtype = getattr(torch, matched[3], None) if matched[3] else (torch.int64 if integer else torch.float32)
        if matched is None or not isinstance(dtype, torch.dtype):
            raise PlanError(f"input is {text!r}; give NAME=SHAPE or NAME=SHAPE:DTYPE, as in pixel_values=1x3x224x224")
        found[matched[1]] = torch.empty([int(size) for size in matched[2].split("x")], dtype=dtype, device="meta")
    return found


INTEGER_SUFFIXES = ("_ids", "_mask", "_thw", "_sizes", "_shapes", "labels", "timestep")
"""Suffixes of the names of integer inputs."""


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward by name."""
    return inspect.signature(model.forward).parameters


def main_input(model: nn.Module) -> str | None:
    """Return the name of a transformers model's main input; None for other models."""
    name: Any = getattr(model, "main_input_name", None)
    return name if name is None or isinstance(name, str) else str(next(iter(name), None))


def fields(config: Any, *names: str) -> list[int]:
    """Return the positive ints that a config, or one nested in it, has under any of `names`, outermost first."""
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
    """Return the first of `fields`, or `default` if there is none."""
    return next(iter(fields(config, *names)), default)


def plain_token(config: Any) -> int:
    """Return a token id that is not a special token of this config."""
    special = {value for value in _token_ids(config) if isinstance(value, int)}
    return next(number for number in range(3, 4 + len(special) + 3) if number not in special)


def _token_ids(config: Any) -> Iterator[Any]:
    configs = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    for each in configs:
        for name, value in vars(each).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                yield from value if isinstance(value, (list, tuple)) else [value]


def token_ids(config: Any, batch_size: int, length: int) -> torch.Tensor:
    """Return ids of ordinary tokens: int64, (batch, length)."""
    return torch.full((batch_size, length), plain_token(config), dtype=torch.long)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an input without values, on meta."""
    return torch.empty(shape, dtype=dtype, device="meta")


def modalities(model: nn.Module) -> tuple[str, ...]:
    """Return the input modalities that a transformers model declares: "text", "image", ..."""
    found: Any = getattr(model, "input_modalities", ())
    return (found,) if isinstance(found, str) else tuple(found)


def text_inputs(model: nn.Module, batch_size: int, tokens: int) -> Inputs:
    """Return token ids, and what else tokenizers give to the model: bounding boxes and types of tokens."""
    config: Any = model.config
    accepted = parameters_of(model)
    length = min(tokens, *fields(config, "max_position_embeddings")[:1] or [tokens]) if tokens else 16
    found = {"input_ids": token_ids(config, batch_size, length)}
    if "bbox" in accepted:
        found["bbox"] = torch.zeros(batch_size, length, 4, dtype=torch.long)
    return {**found, **token_types(model, batch_size, length)}


def token_types(model: nn.Module, batch_size: int, length: int) -> Inputs:
    """Return the type of each token, which tokenizers of models that know several types give; none for others."""
    known = getattr(getattr(model, "config", None), "type_vocab_size", 0) or 0
    if known < 2 or "token_type_ids" not in parameters_of(model):
        return {}
    return {"token_type_ids": torch.zeros(batch_size, length, dtype=torch.long)}


def with_end(config: Any, texts: Inputs) -> Inputs:
    """Return the inputs of `text_inputs` with texts that end with the token of their end, for classifiers that look for
    it; none if the config names no such token."""
    ends = getattr(config, "eos_token_id", None)
    end = next(iter(ends), None) if isinstance(ends, (list, tuple)) else ends
    if not texts or not isinstance(end, int):
        return {}
    ids = texts["input_ids"].clone()
    ids[:, -1] = end
    return {**texts, "input_ids": ids}


def image_model_inputs(model: nn.Module, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield candidate inputs of a timm or torchvision model; none for other models."""
    timm: Any = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None)
    size: Any = timm.get("input_size") if isinstance(timm, Mapping) else getattr(timm, "input_size", None)
    if size:
        yield (sample(batch_size, *size),)
    if type(model).__module__.startswith("torchvision."):
        edge = getattr(model, "image_size", None) or IMAGE_SIZES[0]
        yield (sample(batch_size, 3, edge, edge),)
        yield (sample(batch_size, 3, FRAMES, edge, edge),)


def padding_mask(batch_size: int, length: int, prompt: int | None = None, place: int = 0) -> torch.Tensor:
    """Return the mask of a batch whose last sequence has one token of padding: int64, (batch, length).

    Args:
        batch_size: sequences.
        length: tokens of each.
        prompt: tokens of the prompt within; None: all. Generated tokens are no padding.
        place: which token is padding.
    """
    mask = torch.ones(batch_size, length, dtype=torch.long)
    if (length if prompt is None else prompt) > 1:
        mask[-1, place] = 0
    return mask


def padding_of(inputs: Mapping[str, Any], accepted: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the masks of a padded batch that a forward takes, by name; none if it takes no mask.

    Args:
        inputs: of the batch without padding, by name. Masks among them are all ones.
        accepted: names of the arguments that the forward takes.
    """
    found = {name: mask for name, value in inputs.items() if (mask := _with_padding(name, value)) is not None}
    sequence = next((name for name in SEQUENCES if name in inputs and inputs[name].dim() == 2), None)
    if MASK in accepted and MASK not in inputs and sequence is not None:
        found[MASK] = padding_mask(*inputs[sequence].shape)
    return found


def _with_padding(name: str, mask: Any) -> torch.Tensor | None:
    """Return a mask of ones with a zero at the end of its last sequence; None for any other input."""
    known = name.endswith("_mask") and isinstance(mask, torch.Tensor) and mask.device.type != "meta"
    if not known or mask.dim() < 2 or mask.shape[-1] < 2 or not bool(mask.all()):
        return None
    changed = mask.clone()
    changed[-1, ..., -1] = 0
    return changed


def positional_names(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the names of the parameters that take positional arguments one by one."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)


def input_sizes(names: Sequence[str], args: Iterable[Any], kwargs: Mapping[str, Any]) -> InputSizes:
    """Return the sizes of the arguments of a call, without those that take nothing.

    Args:
        names: as `positional_names`.
        args: positional arguments; those beyond the names are named by their position.
        kwargs: keyword arguments.
    """
    named = ((names[place] if place < len(names) else str(place), value) for place, value in enumerate(args))
    return {name: found for name, value in (*named, *kwargs.items()) if (found := tuple(_extents(value)))}


def are_covered(sizes: InputSizes, known: Collection[InputSizes]) -> bool:
    """Whether one of the `known` calls covers one of these sizes."""
    return any(all(_covers(other.get(name, ()), extents) for name, extents in sizes.items()) for other in known)


def _extents(value: Any) -> Iterator[Extent]:
    if isinstance(value, torch.Tensor):
        yield (*value.shape, value.itemsize)
    elif isinstance(value, int):
        if value:
            yield (int(value),)
    elif value is not None and not isinstance(value, (float, str)):
        for tensor in tensors_in(value, set()):
            yield (*tensor.shape, tensor.itemsize)


def _covers(larger: Sequence[Extent], extents: Sequence[Extent]) -> bool:
    """Whether each extent is no larger than the one at its place."""
    return len(extents) <= len(larger) and all(
        len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
        for one, other in zip(extents, larger)
    )
