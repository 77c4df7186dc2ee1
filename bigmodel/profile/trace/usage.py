"""The calls that a model gets when it is used, for each family of models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .generation import generate, transduce
from .session import Session


def use_example(session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record one forward on arguments like the given ones."""
    args, kwargs = session.fake(tuple(args)), session.fake(dict(kwargs))

    def run() -> None:
        session.recorder.call(lambda: session.model(*args, **kwargs), (args, kwargs))

    session.phase("forward", 1, run)


def use_as_configured(session: Session) -> None:
    """Record what the model's config says it is for; nothing if the config does not say."""
    config = getattr(session.model, "config", None)
    name = getattr(session.model, "main_input_name", None)
    if config is None or name is None:
        return
    if name in ("input_ids", "inputs_embeds") and session.workload.context_length > 0:
        _use_text(session, config)
    elif name == "pixel_values":
        _use_image(session, config)
    elif name == "input_features" and session.workload.context_length > 0:
        _use_audio(session, config)


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model of this config takes."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(vision, "num_channels", 3), height, width


def sound_shape(config: Any) -> tuple[int, int]:
    """Return bands and frames of the sounds that a model of this config takes."""
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def _use_image(session: Session, config: Any) -> None:
    pixels = session.zeros(*image_shape(config))
    session.forward(1, pixel_values=pixels)


def _use_audio(session: Session, config: Any) -> None:
    transduce(session, config, {"input_features": session.zeros(*sound_shape(config))})


def _use_text(session: Session, config: Any) -> None:
    """Record what a model that takes token ids is for: generating, translating, or one forward."""
    work = session.workload
    if getattr(config, "is_encoder_decoder", False):
        transduce(session, config, {"input_ids": session.tokens(max(work.prompt_length, 1))})
    elif "past_key_values" in inspect.signature(session.model.forward).parameters and work.cache:
        generate(session, config)
    else:
        session.forward(work.context_length, input_ids=session.tokens(work.context_length))
