"""Generation with a decoder: the forwards that `generate` of transformers runs, and the tensors it keeps between them.

Every forward gets position ids of its own for each sequence, so rotary tables are computed for each. Token ids, mask,
position ids and the last scores stay alive while the next forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .inputs import modalities, token_ids
from .prompt import Prompt
from .session import Session
from .values import real_tensors
from .work import tensors_in

FROM_HOST = "decode, on the host"
"""Name of the phase that replaces the decode phase if the model's main device is the host."""

FURTHER = "further forwards"
"""Name of forwards that belong to the phase after them, such as the decode step before a window is full."""

CACHES = ("past_key_values", "cache_params")
"""Argument names of a forward's cache: of keys and values, or of recurrent states."""


def generate(session: Session, config: Any, media: Mapping[str, torch.Tensor] | None = None) -> None:
    """Record the prefill, and the last decoding step, at which the cache holds all tokens but one.

    Once a sliding window is full, kernels receive a mask and may take less memory than in the step before, so that step
    is recorded too.

    Args:
        session: the fake model.
        config: its config.
        media: images and sounds in the prompt. The prompt includes their placeholders, and is longer than the
            workload's if these need more tokens.
    """
    work = session.workload
    given = None if media is None else Prompt.with_media(session, config, media, work.prompt_length)
    prompt = max(work.prompt_length, 1) if given is None else given.ids.shape[1]
    loop = _Loop(session, config, prompt, given)
    session.phase("prefill", prompt, loop.prefill)
    if work.new_tokens == 0 or work.context_length < 2:
        return
    if given is not None:
        loop.skip(max(work.new_tokens or 1, 1) - 1)
    elif work.new_tokens is None:
        shorter = work.context_length - 1
        loop = _resumed(session, config, loop, prompt=shorter, length=shorter) or _up_to_last_step(session, config)
    else:
        for window in _windows(loop.cache):
            if prompt + 1 < window <= work.context_length:
                loop.skip(window - 2 - loop.ids.shape[1])
                session.phase(FURTHER, 1, lambda: loop.step(1))
        loop.skip(work.context_length - 1 - loop.ids.shape[1])
    with as_when_decoding(session.model):
        settings = _experts_functions(session.model)
        session.phase("decode", 1, lambda: loop.step(1))
    if _experts_functions(session.model) != settings and given is None:
        loop = _before_last_step(session, config, loop)
        session.phase(FROM_HOST, 1, lambda: loop.step(1))


def _before_last_step(session: Session, config: Any, loop: _Loop) -> _Loop:
    """Return a loop as it was before the last step, which `loop` has run."""
    work = session.workload
    prompt, length = work.context_length - (work.new_tokens or 1), work.context_length - 1
    resumed = _resumed(session, config, loop, prompt=prompt, length=length)
    return _up_to_last_step(session, config) if resumed is None else resumed


def _up_to_last_step(session: Session, config: Any) -> _Loop:
    """Return a loop that has run all steps but the last."""
    work = session.workload
    new_tokens = work.new_tokens or 1
    loop = _Loop(session, config, work.context_length - new_tokens)
    loop.prefill()
    loop.skip(new_tokens - 1)
    return loop


def _resumed(session: Session, config: Any, loop: _Loop, *, prompt: int, length: int) -> _Loop | None:
    """Return a loop with a prompt of `prompt` tokens and a cache of `length`, made from `loop` without a forward.

    None if the cache of `loop` cannot be resized.
    """
    if not loop.can_resize():
        return None
    resumed = _Loop(session, config, prompt)
    resumed.cache, resumed.scores = loop.cache, loop.scores
    if length > prompt:
        resumed.append(length - prompt)
    resumed.resize(length)
    return resumed


def _filled_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold anything; those of blocks that were not sampled are empty."""
    return [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_initialized", True)]


def _windows(cache: Any) -> list[int]:
    """Return the sliding windows of a cache's layers, in tokens, ascending."""
    layers = [layer for layer in _filled_layers(cache) if getattr(layer, "is_sliding", False)]
    return sorted({layer.sliding_window for layer in layers if isinstance(layer.sliding_window, int)})


def _keeps_every_token(cache: Any) -> bool:
    """Return whether every layer of a cache holds the keys and values of all tokens."""
    from transformers.cache_utils import DynamicLayer

    layers = _filled_layers(cache)
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _frequencies_change(model: Any) -> bool:
    """Return whether forwards of longer texts change the rotary frequencies of the model."""
    scalings = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    return any(kind in scaling for scaling in scalings for kind in ("dynamic", "longrope"))


def cache_in(output: Any) -> Any:
    """Return the cache in the output of a forward; None for models that keep their state themselves."""
    return next((getattr(output, name) for name in CACHES if getattr(output, name, None) is not None), None)


def _experts_functions(model: Any) -> Any:
    """Return the experts implementation that is set on the model; None without experts."""
    ask: Callable[[], Any] = getattr(model, "get_experts_implementation", lambda: None)
    return ask()


def as_when_decoding(model: Any) -> AbstractContextManager[None]:
    """Return the context in which transformers runs decoding steps: on accelerators it selects an experts
    implementation that gathers the weights of each token's experts."""
    setting: Callable[[], AbstractContextManager[None]] = getattr(model, "_optimize_model_for_decode", nullcontext)
    return setting()


ENCODED = "mm_encoder_outputs"
"""Argument of a forward that takes the outputs of the encoders of images and videos."""

ENCODED_PIXELS = {"pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches"}
"""Inputs that `generate` encodes."""


class _Loop:
    """The loop of `generate`, with the tensors that it keeps between forwards."""

    def __init__(self, session: Session, config: Any, prompt: int, given: Prompt | None = None) -> None:
        self.session = session
        with real_tensors():
            ids = token_ids(config, session.workload.batch_size, prompt) if given is None else given.ids
            ones = torch.ones_like(ids)
        self.media = {} if given is None else given.media
        self.ids = session.tokens(prompt, ids)
        self.positions = session.tokens(prompt, self._order(prompt)) if session.accepts("position_ids") else None
        # The caller keeps its own tensors alive beside the longer ones of the loop. The loop may have no mask.
        mask = session.tokens(prompt, ones)
        self.given = self.ids, mask, self.positions
        self.mask = mask if keeps_mask() else None
        self.unfinished = session.tokens(1)
        self.chosen: torch.Tensor | None = None
        self.special = kept_ids(session, config)
        self.scores: torch.Tensor | None = None
        self.caches = getattr(getattr(session.model, "generation_config", None), "use_cache", None) is not False
        self.cache = _new_cache(session, config) if self.caches else None

    def prefill(self) -> None:
        """Run the forward of the whole prompt."""
        media, self.encoded = encode_media(self.session, self.media)
        encoded = {ENCODED: self.encoded} if self.encoded else {}
        self._run(self.ids.clone(), self.positions, **media, **encoded)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip.

        Without a cache, it reads the whole text again.
        """
        self.append(tokens)
        if not self.caches:
            self._run(self.ids.clone(), self.positions)
            return
        positions = None if self.positions is None else self.positions[:, -tokens:].clone()
        self._run(self.ids[:, -tokens:].clone(), positions)

    def append(self, tokens: int) -> None:
        """Append `tokens` chosen tokens to the text."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids = torch.cat([self.ids, more], 1)
        if self.positions is not None:
            self.positions = torch.cat([self.positions, more], 1)
            self.session.recorder.values.give(self.positions, self._order(self.positions.shape[1]))
        if self.mask is not None:
            self.mask = torch.cat([self.mask, more], 1)

    def can_resize(self) -> bool:
        """Return whether the cache holds keys and values of the whole text: no sliding windows or recurrent states."""
        layers, tokens = _filled_layers(self.cache), self.ids.shape[1]
        return _keeps_every_token(self.cache) and all(layer.get_seq_length() == tokens for layer in layers)

    def resize(self, tokens: int) -> None:
        """Let the cache hold `tokens` tokens, in new storages, and make the scores anew, as forwards would."""
        for layer in _filled_layers(self.cache):
            for name in ("keys", "values"):
                held = getattr(layer, name)
                with self.session.recorder.as_unit_of(held):
                    setattr(layer, name, held.new_empty((*held.shape[:-2], tokens, held.shape[-1])))
                del held
        if self.scores is not None:
            with self.session.recorder.at_inputs():
                self.scores = torch.empty_like(self.scores)

    def skip(self, steps: int) -> None:
        """Leave what `steps` steps leave: without a forward if the cache can be resized, else in one if that leaves the
        same cache.

        A layer with a window keeps the storage of all tokens of the last forward, so its last step is a forward of its
        own.
        """
        if not self.caches:
            if steps > 0:
                self.append(steps)
            return
        if steps and self.can_resize() and not _frequencies_change(self.session.model):
            self.append(steps)
            self.resize(self.ids.shape[1])
            return
        alone = 0 if _keeps_every_token(self.cache) else 1
        if steps > alone:
            self.step(steps - alone)
        if steps and alone:
            self.step(1)

    def _order(self, tokens: int) -> torch.Tensor:
        """Return the positions of the first `tokens` tokens of each sequence."""
        with real_tensors():
            return torch.arange(tokens).repeat(self.session.workload.batch_size, 1)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor | None, **media: Any) -> None:
        keep: dict[str, Any] = {} if self.session.workload.all_logits else {"logits_to_keep": 1}
        mask = [] if self.mask is None else [self.mask]
        cache = dict.fromkeys(CACHES, self.cache) if self.caches else {}
        order = {} if positions is None else {"position_ids": positions}
        inputs = {"input_ids": ids, **order, **cache, "use_cache": self.caches, **keep, **media}
        kept = [*tensors_in(media), *([] if self.positions is None else [self.positions])]
        output = self.session.generate_with(kept, mask, **inputs)
        self.scores = next_token_scores(self.session, output)
        returned = cache_in(output)
        self.cache = self.cache if returned is None else returned


def encode_media(session: Session, media: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the media that are left when `generate` has encoded images and videos, and the encoders' outputs by kind.

    `generate` does so before the first forward if the model's forward takes the outputs in the place of images.
    """
    left = dict(media)
    encoded: dict[str, Any] = {}
    if not session.accepts(ENCODED):
        return left, encoded
    base = getattr(session.model, "base_model", session.model)
    for kind in ("image", "video"):
        encode: Any = getattr(base, f"get_{kind}_features", None)
        if encode is None or kind not in modalities(session.model):
            continue
        taken = {name: media[name] for name in inspect.signature(encode).parameters if name in media}
        if not ENCODED_PIXELS.isdisjoint(taken):
            encoded[kind] = encode(**taken, return_dict=True)
        left = {name: value for name, value in left.items() if name not in taken}
    return left, encoded


def next_token_scores(session: Session, output: Any) -> torch.Tensor | None:
    """Return the scores of the next token, the last logits in float32 on the inputs' device; compute their argmax.

    Scores of suppressed tokens are replaced.
    """
    logits = getattr(output, "logits", None)
    if logits is None or logits.dim() != 3:
        return None
    with session.recorder.at_inputs():
        scores: torch.Tensor = logits[:, -1, :].to(dtype=torch.float32, copy=True)
        for _ in suppressed_tokens(session.model):
            tokens = torch.arange(scores.shape[-1], device=scores.device)
            scores = torch.where(torch.empty_like(tokens, dtype=torch.bool), -torch.inf, scores)
        scores.argmax(-1)
    return scores


def suppressed_tokens(model: Any) -> list[list[int]]:
    """Return the lists of tokens that `generate` never chooses, or not as the first."""
    settings = getattr(model, "generation_config", None)
    lists = (getattr(settings, name, None) for name in ("suppress_tokens", "begin_suppress_tokens"))
    return [each for each in lists if each is not None]


def kept_ids(session: Session, config: Any) -> list[torch.Tensor]:
    """Return the token ids that `generate` keeps as tensors, without the text: its special tokens (bos, eos, pad, the
    decoder's first) and those that it suppresses."""
    generation = getattr(session.model, "generation_config", None)
    named = [generation, config.get_text_config(decoder=True)]

    def ids_of(name: str, *settings: Any) -> Any:
        return next((value for each in settings if (value := getattr(each, name, None)) is not None), None)

    begin, end, pad = (ids_of(f"{kind}_token_id", *named) for kind in ("bos", "eos", "pad"))
    seq2seq = getattr(config, "is_encoder_decoder", False)
    first = ids_of("decoder_start_token_id", *(named if seq2seq else [generation]))
    kinds = [begin, end, end if pad is None else pad, first, *suppressed_tokens(session.model)]
    return [session.ids(len(kind) if isinstance(kind, list) else 1) for kind in kinds if kind is not None]


def _new_cache(session: Session, config: Any) -> Any:
    """Return the empty cache that `generate` gives to the model; None if the model makes its own.

    Encoders that are used as decoders fill a cache that they are given, and make none.
    """
    from transformers import DynamicCache, StaticCache

    if session.workload.cache == "static":
        return StaticCache(config=config, max_cache_len=session.workload.context_length)
    is_given: Callable[[], bool] = getattr(session.model, "_supports_default_dynamic_cache", lambda: False)
    return DynamicCache(config=config.get_text_config(decoder=True)) if is_given() else None


@cache
def keeps_mask() -> bool:
    """Return whether `generate` of the installed transformers passes an attention mask of ones to the model.

    If it does, it keeps a mask that grows with the text. Versions differ, so this is observed on a tiny model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 4}
    seen: list[bool] = []

    def record(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask") is not None)

    with real_tensors(), torch.no_grad():
        state = torch.get_rng_state()
        model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes))
        model.register_forward_pre_hook(record, with_kwargs=True)
        ids = torch.zeros(1, 2, dtype=torch.long)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
        torch.set_rng_state(state)
    return any(seen)
