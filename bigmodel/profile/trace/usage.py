"""The calls that a model gets in use, by family: generation, encoder-decoder generation, one forward.

`uses_of` chooses by the model's conventions. The loops imitate `generate` of transformers, as tensors that it
keeps between forwards count: every forward gets position ids of its own for each sequence (so rotary tables are made
for each), and token ids, mask, position ids and the last scores stay alive while the next forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .inputs import (
    Inputs,
    fields,
    main_input,
    media_inputs,
    parameters_of,
    plain_inputs,
    text_inputs,
    token_ids,
)
from .session import Session
from .values import real_tensors
from .workload import Workload

FROM_HOST = "decode, the first weights on the host"
"""Name of a phase that replaces the decode phase if the model's first weights lie on the host."""


CACHES = ("past_key_values", "cache_params")
"""Names under which forwards take and return their cache: of keys and values, or of states."""

FILLING = "decode, before a window is full"
"""Name of further steps of the decode phase that follows."""


def generate(session: Session, config: Any, media: Mapping[str, torch.Tensor] | None = None) -> None:
    """Record the prefill of the prompt, and the last decoding step, when the cache holds all tokens but one.

    Args:
        session: the fake model.
        config: its config.
        media: images and sounds that come with the prompt, whose placeholders are part of it. A prompt that cannot
            hold these is as long as it must be.

    Once a sliding window is full, kernels are given a mask and may take less memory than in the step before: that one
    is recorded too.
    """
    work = session.workload
    given = None if media is None else _Prompt.with_media(session, config, media)
    prompt = max(work.prompt_length, 1) if given is None else given.ids.shape[1]
    loop = _Loop(session, config, prompt, given)
    session.phase("prefill", prompt, loop.prefill)
    if work.new_tokens == 0 or work.context_length < 2:
        return
    if given is not None:
        loop.skip(max(work.new_tokens or 1, 1) - 1)
    elif work.new_tokens is None:
        loop = _shorter_by_one(session, config, loop) or _up_to_last_step(session, config)
    else:
        for window in _windows(loop.cache):
            if prompt + 1 < window <= work.context_length:
                loop.skip(window - 2 - loop.ids.shape[1])
                session.phase(FILLING, 1, lambda: loop.step(1))
        loop.skip(work.context_length - 1 - loop.ids.shape[1])
    with as_when_decoding(session.model):
        settings = _experts_functions(session.model)
        session.phase("decode", 1, lambda: loop.step(1))
    if _experts_functions(session.model) != settings and given is None:
        del loop
        loop = _up_to_last_step(session, config)
        session.phase(FROM_HOST, 1, lambda: loop.step(1))


def _up_to_last_step(session: Session, config: Any) -> _Loop:
    """Return a generation before its last step."""
    work = session.workload
    new_tokens = work.new_tokens or 1
    loop = _Loop(session, config, work.context_length - new_tokens)
    loop.prefill()
    loop.skip(new_tokens - 1)
    return loop


def _shorter_by_one(session: Session, config: Any, loop: _Loop) -> _Loop | None:
    """Return a generation whose prompt is one token shorter, made from `loop` without another prefill.

    None if the cache does not hold the keys and values of all tokens (sliding windows, states).
    """
    prompt = loop.ids.shape[1]
    layers = _filled_layers(loop.cache)
    if not _keeps_every_token(loop.cache) or any(layer.get_seq_length() != prompt for layer in layers):
        return None
    shorter = _Loop(session, config, prompt - 1)
    for layer in layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            with session.recorder.as_maker_of(held):
                setattr(layer, name, held.new_empty((*held.shape[:-2], prompt - 1, held.shape[-1])))
            del held
    shorter.cache = loop.cache
    shorter.scores = None if loop.scores is None else torch.empty_like(loop.scores)
    return shorter


def _filled_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold anything: those beyond the sampled blocks do not."""
    return [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_initialized", True)]


def _windows(cache: Any) -> list[int]:
    """Return the sliding windows of a cache's layers, in tokens, ascending."""
    layers = [layer for layer in _filled_layers(cache) if getattr(layer, "is_sliding", False)]
    return sorted({layer.sliding_window for layer in layers if isinstance(layer.sliding_window, int)})


def _keeps_every_token(cache: Any) -> bool:
    """Return whether every layer of a cache holds the keys and values of all tokens: no windows, no states."""
    from transformers.cache_utils import DynamicLayer

    layers = _filled_layers(cache)
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _cache_in(output: Any) -> Any:
    """Return the cache that a forward returned; None for models that keep their state themselves."""
    return next((getattr(output, name) for name in CACHES if getattr(output, name, None) is not None), None)


def _experts_functions(model: Any) -> Any:
    """Return the experts implementation that is set on the model; None without experts."""
    ask: Callable[[], Any] = getattr(model, "get_experts_implementation", lambda: None)
    return ask()


def as_when_decoding(model: Any) -> AbstractContextManager[None]:
    """Return the context in which `transformers` decodes: on accelerators it switches to another experts
    implementation, which gathers the weights of each token's experts."""
    setting: Callable[[], AbstractContextManager[None]] = getattr(model, "_optimize_model_for_decode", nullcontext)
    return setting()


class _Loop:
    """A generation in progress, with the tensors that the loop of `generate` keeps between forwards."""

    def __init__(self, session: Session, config: Any, prompt: int, given: _Prompt | None = None) -> None:
        self.session = session
        with real_tensors():
            ids = token_ids(config, session.workload.batch_size, prompt) if given is None else given.ids
            ones = torch.ones_like(ids)
        self.media = {} if given is None else given.media
        self.ids = session.tokens(prompt, ids)
        self.positions = session.tokens(prompt, self._order(prompt)) if session.accepts("position_ids") else None
        # The caller's tensors stay alive after the loop made longer ones; the mask may be the caller's alone.
        mask = session.tokens(prompt, ones)
        self.given = self.ids, mask, self.positions
        self.mask = mask if keeps_mask() else None
        self.unfinished = session.tokens(1)
        self.chosen: torch.Tensor | None = None
        self.special = [session.ids(count) for count in _special_tokens(session.model, config)]
        self.scores: torch.Tensor | None = None
        self.cache = _new_cache(session, config)

    def prefill(self) -> None:
        """Run the forward of the whole prompt."""
        self._run(self.ids.clone(), self.positions, **self.media)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids = torch.cat([self.ids, more], 1)
        if self.positions is not None:
            self.positions = torch.cat([self.positions, more], 1)
            self.session.recorder.values.give(self.positions, self._order(self.positions.shape[1]))
        if self.mask is not None:
            self.mask = torch.cat([self.mask, more], 1)
        del more
        positions = None if self.positions is None else self.positions[:, -tokens:].clone()
        self._run(self.ids[:, -tokens:].clone(), positions)

    def skip(self, steps: int) -> None:
        """Run as many steps, at once where that leaves the same cache. A layer with a window keeps the storage of all
        tokens of the last forward, so the last step is one by itself."""
        alone = 0 if _keeps_every_token(self.cache) else 1
        if steps > alone:
            self.step(steps - alone)
        if steps and alone:
            self.step(1)

    def _order(self, tokens: int) -> torch.Tensor:
        """Return the positions of the first `tokens` tokens of each sequence."""
        with real_tensors():
            return torch.arange(tokens).repeat(self.session.workload.batch_size, 1)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor | None, **media: torch.Tensor) -> None:
        keep: dict[str, Any] = {} if self.session.workload.all_logits else {"logits_to_keep": 1}
        mask = [] if self.mask is None else [self.mask]
        cache = dict.fromkeys(CACHES, self.cache)
        order = {} if positions is None else {"position_ids": positions}
        inputs = {"input_ids": ids, **order, **cache, "use_cache": True, **keep, **media}
        kept = [] if self.positions is None else [self.positions]
        output = self.session.generate_with(kept, mask, **inputs)
        self.scores = scores_of(self.session, output)
        self.cache = _cache_in(output)


def transduce(session: Session, config: Any, source: dict[str, torch.Tensor]) -> None:
    """Record encoding with the first decoding step as prefill, and the last decoding step.

    If any share of the context may be generated, a text fills it and two tokens follow (a token takes as much in the
    cache on either side); what is seen or heard is none of it, so as many tokens follow.
    """
    new_tokens = session.workload.new_tokens
    if new_tokens is None:
        new_tokens = 2 if "input_ids" in source else session.workload.context_length
    loop = _Transduction(session, config, source)
    session.phase("prefill", max(session.workload.prompt_length, 1), loop.begin)
    if new_tokens > 1:
        if new_tokens > 2:
            loop.step(new_tokens - 2)
        session.phase("decode", 1, lambda: loop.step(1))


class _Transduction:
    """An encoder-decoder generation in progress, with the tensors that the loop keeps between forwards."""

    def __init__(self, session: Session, config: Any, source: dict[str, torch.Tensor]) -> None:
        self.session = session
        self.source = source
        # The source's mask stays alive; the model is called without it, as it masks nothing.
        self.mask = session.tokens(next(iter(source.values())).shape[1]) if "input_ids" in source else None
        self.special = [session.ids(count) for count in _special_tokens(session.model, config, "decoder_start")]
        self.chosen: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.cache: Any = None

    def begin(self) -> None:
        """Encode the source and decode the first token."""
        encoder: Any = self.session.model.get_encoder()  # type: ignore[operator]
        if hasattr(self.session.model, "generate_with_fallback"):  # Whisper: a copy of each segment of a sound
            self.source = {name: tensor.clone() for name, tensor in self.source.items()}
        self.encoded = encoder(**self.source)
        self.ids = self.start = self.session.tokens(1)
        self.unfinished = self.session.tokens(1)
        self._run(self.ids.clone())

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids = torch.cat([self.ids, more], 1)
        del more
        self._run(self.ids[:, -tokens:].clone())

    def _run(self, ids: torch.Tensor) -> None:
        output = self.session.generate_with(
            encoder_outputs=self.encoded, decoder_input_ids=ids, past_key_values=self.cache, use_cache=True
        )
        self.scores = scores_of(self.session, output)
        self.cache = _cache_in(output)


def scores_of(session: Session, output: Any) -> torch.Tensor | None:
    """Return the scores of the next token, the last logits in float32 on the inputs' device, and take their argmax."""
    logits = getattr(output, "logits", None)
    if logits is None or logits.dim() != 3:
        return None
    with session.recorder.at_inputs():
        scores: torch.Tensor = logits[:, -1, :].to(dtype=torch.float32, copy=True)
        scores.argmax(-1)
    return scores


def _special_tokens(model: Any, config: Any, *more: str) -> list[int]:
    """Return how many ids each kind of special token has (bos, eos, pad, `more`); the loop keeps a tensor of each."""
    settings = [getattr(model, "generation_config", None), config.get_text_config(decoder=True)]

    def ids_of(kind: str) -> Any:
        named = (getattr(each, f"{kind}_token_id", None) for each in settings)
        return next((value for value in named if value is not None), None)

    begin, end, pad, *rest = map(ids_of, ("bos", "eos", "pad", *more))
    kinds = [begin, end, end if pad is None else pad, *rest]
    return [len(kind) if isinstance(kind, list) else 1 for kind in kinds if kind is not None]


def _new_cache(session: Session, config: Any) -> Any:
    """Return the cache of the workload; None lets the model make its own dynamic one."""
    if session.workload.cache != "static":
        return None
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=session.workload.context_length)


@cache
def keeps_mask() -> bool:
    """Return whether `generate` of the installed transformers passes on a mask that masks nothing.

    If it does, it keeps a mask that grows with the text. Versions differ, so it is observed on a tiny model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 4}
    seen: list[bool] = []

    def look(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask") is not None)

    with real_tensors(), torch.no_grad():
        state = torch.get_rng_state()
        model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes))
        model.register_forward_pre_hook(look, with_kwargs=True)
        ids = torch.zeros(1, 2, dtype=torch.long)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
        torch.set_rng_state(state)
    return any(seen)


@dataclass(frozen=True)
class _Prompt:
    """A prompt with images or sounds: its token ids, with placeholders for them, and fake inputs beside the ids."""

    ids: torch.Tensor
    media: Mapping[str, torch.Tensor]

    @classmethod
    def with_media(cls, session: Session, config: Any, media: Mapping[str, torch.Tensor]) -> _Prompt:
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
        if placeholder is not None:
            fake = {**fake, "mm_token_type_ids": session.fake(kinds)}
        return cls(ids, fake)


PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Fields of a config with the token that stands for a feature of each kind of media."""


def _features(found: Any) -> list[torch.Tensor]:
    """Return the tensors of features that a model's `get_image_features`, say, has returned."""
    if hasattr(found, "pooler_output"):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def use_sample(session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record the use of a model on given arguments: one forward, or a generation that begins with them."""
    ids = kwargs.get("input_ids")
    config = getattr(session.model, "config", None)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not args and _generates(session.model, session.workload):
        generate(session, config, kwargs)
        return
    args, kwargs = (session.fake(value, session.dtype) for value in (tuple(args), dict(kwargs)))

    def run() -> None:
        session.recorder.call(lambda: session.model(*args, **kwargs), (args, kwargs))

    session.phase("forward", 1, run)


@dataclass(frozen=True)
class Use:
    """One use of a model.

    Attributes:
        record: records its forwards.
        without: kinds of inputs that the model may be given and is not: "images or sounds"; empty: none.
    """

    record: Callable[[Session], None]
    without: str = ""


def uses_of(model: nn.Module, workload: Workload) -> Iterator[Use]:
    """Yield the uses that a model may have by the conventions of its library, those that take most first.

    The first that runs is the one. Nothing is yielded for a model that follows no known convention, nor for one of
    texts if the workload has no tokens.
    """
    config: Any = getattr(model, "config", None)
    batch_size, tokens = workload.batch_size, workload.context_length
    name = main_input(model)
    if config is None or name is None:
        for inputs in plain_inputs(model, batch_size):
            yield Use(partial(_use_forward, inputs=inputs))
        return
    if name not in KNOWN or (name in TEXT and tokens == 0):
        return
    media = list(media_inputs(model, batch_size))
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder") and tokens:
        sources: list[Inputs] = media if name not in TEXT else []
        sources = [*sources, {"input_ids": token_ids(config, batch_size, max(workload.prompt_length, 1))}]
        for source in sources:
            yield Use(partial(_use_transduction, source=source))
    if _generates(model, workload):
        for inputs in media:
            yield Use(partial(generate, config=config, media=inputs))
        yield Use(partial(generate, config=config), MEDIA if media else "")
    texts = text_inputs(model, batch_size, tokens) if "input_ids" in parameters_of(model) else {}
    for inputs in [*media, {}]:
        both = {**texts, **inputs}
        alone = [inputs] if inputs and name not in TEXT else []
        for chosen in [*alone, both] if "text" not in _modalities_of(model) else [both, *alone]:
            if chosen:
                tokens_run = tokens if "input_ids" in chosen else 1
                without = MEDIA if media and not inputs else ""
                yield Use(partial(_use_forward, inputs=chosen, tokens=tokens_run), without)


MEDIA = "images or sounds"

TEXT = ("input_ids", "inputs_embeds")
"""Principal inputs of models of text."""

KNOWN = (
    *TEXT, "pixel_values", "pixel_values_videos", "flattened_patches", "hidden_states", "input_features",
    "input_values", "audio_values", "past_values",
)  # fmt: skip
"""Principal inputs whose shapes are known."""


def _modalities_of(model: nn.Module) -> Any:
    return getattr(model, "input_modalities", ())


def _generates(model: nn.Module, workload: Workload) -> bool:
    """Return whether a model is used by generating token after token with a cache."""
    config = getattr(model, "config", None)
    if config is None or not workload.cache or not workload.context_length or main_input(model) not in TEXT:
        return False
    return not getattr(config, "is_encoder_decoder", False) and not set(CACHES).isdisjoint(parameters_of(model))


def _use_transduction(session: Session, source: Inputs) -> None:
    transduce(session, getattr(session.model, "config", None), session.fake(source, session.dtype))


def _use_forward(session: Session, inputs: Inputs | tuple[torch.Tensor, ...], tokens: int = 1) -> None:
    fake = session.fake(inputs, session.dtype)
    args, kwargs = (fake, {}) if isinstance(fake, tuple) else ((), fake)

    def run() -> None:
        session.recorder.call(lambda: session.model(*args, **kwargs), (args, kwargs))

    session.phase("forward", tokens, run)
