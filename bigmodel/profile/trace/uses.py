"""The uses of a model: generation, encoder-decoder generation, or one forward; chosen by its library's conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .codebooks import generate_sound, generates_codes, sounds_of
from .diffusion_inputs import diffusion_inputs, has_both_ways, use_autoencoder
from .feature_inputs import feature_inputs
from .generation import CACHES, FURTHER, generate
from .inputs import (
    IMAGES,
    LABELS,
    SERIES,
    SOUNDS,
    TEXT,
    Inputs,
    image_model_inputs,
    main_input,
    modalities,
    padding_of,
    parameters_of,
    sample,
    text_inputs,
    token_ids,
    with_end,
)
from .media_inputs import media_inputs, robot_inputs
from .prompt import Prompt
from .seq2seq import generate_seq2seq
from .session import Session
from .values import real_tensors
from .workload import Workload


def use_sample(session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record one forward on given arguments, or a generation whose prompt they are; with labels among these, too, the
    forward that has a loss."""
    ids = kwargs.get("input_ids")
    config = getattr(session.model, "config", None)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not args and _generates(session.model, session.workload):
        if kwargs.get(LABELS) is not None:
            given = session.fake(dict(kwargs), session.dtype)
            session.phase(FURTHER, ids.shape[1], lambda: session.call_plain(**given))
            del given
        generate(session, config, {name: value for name, value in kwargs.items() if name != LABELS})
        return
    args, kwargs = (session.fake(value, session.dtype) for value in (tuple(args), dict(kwargs)))

    def run() -> None:
        session.call_plain(*args, **kwargs)

    _record_forward(session, 1, run)


def _record_forward(session: Session, tokens: int, run: Callable[[], None]) -> None:
    """Record a forward; if its modules keep tensors, as hooks keep weights that they make, also the one after it, which
    runs beside them, and a third one if that keeps more."""
    begin, kept = len(session.recorder.events), [0]
    for _ in range(FORWARDS):
        if len(kept) > 1:
            session.marks[-1] = (FURTHER, *session.marks[-1][1:])
        session.phase("forward", tokens, run)
        kept.append(session.recorder.kept_since(begin))
        if kept[-1] <= kept[-2]:
            return
    session.grows = True


@dataclass(frozen=True)
class Use:
    """One use of a model.

    Attributes:
        record: records its forwards.
        without: what the model takes and this use leaves out: "images or sounds", "a KV cache"; empty: nothing.
        media: kind of the inputs other than text: "images"; empty: text alone, or not known.
        way: uses with different media belong together if this is the same.
    """

    record: Callable[[Session], None]
    without: str = ""
    media: str = ""
    way: str = ""


def uses_of(model: nn.Module, workload: Workload) -> Iterator[Use]:
    """Yield the uses that a model may have by the conventions of its library, those that take most memory first.

    The caller records the first that runs on fake tensors, and of those in the same way the first with each other kind
    of media. Nothing is yielded for a model that follows no known convention, nor for a text model if the workload has
    no tokens.
    """
    config: Any = getattr(model, "config", None)
    batch_size, tokens = workload.batch_size, workload.context_length
    name = main_input(model)
    if config is None or name is None:
        for images in image_model_inputs(model, batch_size):
            yield Use(partial(_use_forward, inputs=images))
        for conditioned in diffusion_inputs(model, batch_size):
            if has_both_ways(model):
                yield Use(partial(_use_both_ways, inputs=conditioned))
            yield Use(partial(_use_forward, inputs=conditioned))
        return
    if name not in KNOWN or (name in TEXT and tokens == 0):
        for features in feature_inputs(model, batch_size, tokens):
            yield Use(partial(_use_forward, inputs=features))
        return
    if name == STATE:
        for robot in robot_inputs(model, batch_size, tokens):
            yield Use(partial(_use_forward, inputs=robot, tokens=robot["input_ids"].shape[1]))
        return
    media = [] if parameters_of(model).keys().isdisjoint(MEDIA) else list(media_inputs(model, batch_size))
    if tokens and hasattr(model, "audio_encoder") and generates_codes(model):
        for sounds in (*sounds_of(model, batch_size), {}):
            text = token_ids(config, batch_size, max(workload.prompt_length, 1))
            yield Use(partial(_use_codebooks, source={"input_ids": text, **sounds}), "", media_in(sounds), "transduce")
        return
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder") and tokens:
        sources: list[Inputs] = media if name not in TEXT else []
        length = max(workload.prompt_length, 1)
        places = {"bbox": sample(batch_size, length, 4)} if "bbox" in parameters_of(model) else {}
        sources = [*sources, {"input_ids": token_ids(config, batch_size, length), **places}]
        for source in sources:
            without = WITHOUT_MEDIA if places and media and not media_in(source) else ""
            yield Use(partial(_use_seq2seq, source=source), without, media_in(source), "transduce")
    generates = _generates(model, workload)
    if generates:
        for inputs in media:
            yield Use(partial(generate, config=config, media=inputs), media=media_in(inputs), way="generate")
        yield Use(partial(generate, config=config), WITHOUT_MEDIA if media else "")
    texts = text_inputs(model, batch_size, tokens) if "input_ids" in parameters_of(model) else {}
    for inputs in [*media, {}]:
        both = {**texts, **inputs}
        alone = [inputs] if inputs and name not in TEXT else []
        for chosen in [*alone, both] if "text" not in modalities(model) else [both, *alone]:
            if chosen:
                tokens_run = tokens if "input_ids" in chosen else 1
                if media_in(chosen) and _has_generating_part(model, workload):
                    yield Use(partial(_use_generating_part, inputs=chosen, tokens=tokens_run), media=media_in(chosen))
                without = WITHOUT_CACHE if generates else WITHOUT_MEDIA if media and not inputs else ""
                yield Use(partial(_use_forward, inputs=chosen, tokens=tokens_run), without, media_in(inputs), "forward")
    ended = with_end(config, texts)
    if ended:
        yield Use(partial(_use_forward, inputs=ended, tokens=tokens), WITHOUT_MEDIA if media else "", way="forward")
    for features in feature_inputs(model, batch_size, tokens):
        yield Use(partial(_use_forward, inputs=features))


MEDIA = (*IMAGES, *SOUNDS, *SERIES)
"""Inputs other than text whose shapes are known."""

FORWARDS = 3
"""Forwards that are planned for a model whose modules keep more with each."""

KINDS_OF_MEDIA = {"images": IMAGES, "sounds": SOUNDS, "time series": SERIES}

WITHOUT_MEDIA = "images or sounds"
WITHOUT_CACHE = "a KV cache"

STATE = "state"
"""Main input of models that move robots."""

KNOWN = (*TEXT, *MEDIA, STATE, "hidden_states")
"""Main inputs whose shapes are known; "hidden_states" are patches of images."""


def media_in(inputs: Inputs) -> str:
    """Return the kind of media among the inputs of a forward; empty if there is none."""
    return next((kind for kind, names in KINDS_OF_MEDIA.items() if not inputs.keys().isdisjoint(names)), "")


def _generates(model: nn.Module, workload: Workload) -> bool:
    """Return whether a model is a decoder that generates with a cache; the bare model below its head does not."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate") or main_input(model) not in TEXT:
        return False
    if not workload.cache or not workload.context_length:
        return False
    return not getattr(config, "is_encoder_decoder", False) and not set(CACHES).isdisjoint(parameters_of(model))


def _has_generating_part(model: nn.Module, workload: Workload) -> bool:
    """Return whether a model has a `generate` of its own, which calls that of the language model within, as BLIP-2."""
    part = getattr(model, "language_model", None)
    own = next((kind for kind in type(model).__mro__ if "generate" in vars(kind)), None)
    if own is None or not own.__module__.startswith(type(model).__module__) or not hasattr(part, "generate"):
        return False
    return bool(workload.cache) and workload.context_length > 1 and workload.new_tokens != 0


def _use_generating_part(session: Session, inputs: Inputs, tokens: int) -> None:
    """Record a forward of the whole model, and the generation of the language model within, beside these inputs."""
    given = session.fake(inputs, session.dtype)  # alive throughout
    _use_forward(session, inputs, tokens)
    session.marks[-1] = (FURTHER, *session.marks[-1][1:])
    part: Any = session.model.language_model
    inner = Session(part, session.recorder, session.workload, session.device)
    if getattr(part.config, "is_encoder_decoder", False):
        length = max(session.workload.prompt_length, 1)
        ids = token_ids(part.config, session.workload.batch_size, length)
        generate_seq2seq(inner, part.config, session.fake({"input_ids": ids}))
    else:
        generate(inner, part.config)
    session.marks += inner.marks
    del given


def _use_seq2seq(session: Session, source: Inputs) -> None:
    generate_seq2seq(session, getattr(session.model, "config", None), session.fake(source, session.dtype))


def _use_codebooks(session: Session, source: Inputs) -> None:
    generate_sound(session, getattr(session.model, "config", None), session.fake(source, session.dtype))


def _use_both_ways(session: Session, inputs: Inputs) -> None:
    """Record encoder and decoder, which are called by themselves too, and the forward that calls both."""
    use_autoencoder(session, session.fake(inputs["sample"], session.dtype), FURTHER)
    _use_forward(session, inputs)


def _use_forward(session: Session, inputs: Inputs | tuple[torch.Tensor, ...], tokens: int = 1) -> None:
    if isinstance(inputs, tuple):
        use_sample(session, inputs, {})
        return
    kwargs = _with_placeholders(session, inputs)

    def run(masks: Inputs) -> None:
        session.call_plain(**{**kwargs, **masks})

    texts = {name: kwargs[name] for name in kwargs if name == "input_ids"}  # with placeholders
    with real_tensors():
        masks = padding_of({**inputs, **texts}, parameters_of(session.model))
    if masks and session.workload.padded:
        session.attempt(FURTHER, tokens, lambda: run(session.fake(masks, session.dtype)))
    _record_forward(session, tokens, lambda: run({}))


def _with_placeholders(session: Session, inputs: Inputs) -> Inputs:
    """Return fake inputs of a forward, whose text has a placeholder for each feature of an image or sound in them."""
    config: Any = getattr(session.model, "config", None)
    if "input_ids" not in inputs or inputs.keys().isdisjoint(MEDIA):
        return session.fake(inputs, session.dtype)
    media = {name: value for name, value in inputs.items() if name != "input_ids"}
    prompt = Prompt.with_media(session, config, media, inputs["input_ids"].shape[1])
    return {"input_ids": session.fake(prompt.ids), **prompt.media}
