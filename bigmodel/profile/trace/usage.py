"""The calls that a model gets in use, by family: generation, encoder-decoder generation, one forward.

`use_as_configured` chooses by the model's config. The loops imitate `generate` of transformers, as tensors that it
keeps between forwards count: every forward gets position ids of its own for each sequence (so rotary tables are made
for each), and token ids, mask, position ids and the last scores stay alive while the next forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .session import Session

FROM_HOST = "decode, the first weights on the host"
"""Name of a phase that replaces the decode phase if the model's first weights lie on the host."""


FILLING = "decode, before a window is full"
"""Name of further steps of the decode phase that follows."""


def generate(session: Session, config: Any) -> None:
    """Record the prefill of the prompt, and the last decoding step, when the cache holds all tokens but one.

    Once a sliding window is full, kernels are given a mask and may take less memory than in the step before: that one
    is recorded too.
    """
    work = session.workload
    prompt = max(work.prompt_length, 1)
    loop = _Loop(session, config, prompt)
    session.phase("prefill", prompt, loop.prefill)
    if work.new_tokens == 0 or work.context_length < 2:
        return
    if work.new_tokens is None:
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
    if _experts_functions(session.model) != settings:
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

    def __init__(self, session: Session, config: Any, prompt: int) -> None:
        self.session = session
        self.ids, self.positions = session.tokens(prompt), session.tokens(prompt)
        # The caller's tensors stay alive after the loop made longer ones; the mask may be the caller's alone.
        mask = session.tokens(prompt)
        self.given = self.ids, mask, self.positions
        self.mask = mask if keeps_mask() else None
        self.unfinished = session.tokens(1)
        self.chosen: torch.Tensor | None = None
        self.special = [session.ids(count) for count in _special_tokens(config)]
        self.scores: torch.Tensor | None = None
        self.cache = _new_cache(session, config)

    def prefill(self) -> None:
        """Run the forward of the whole prompt."""
        self._run(self.ids.clone(), self.positions)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids, self.positions = torch.cat([self.ids, more], 1), torch.cat([self.positions, more], 1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, more], 1)
        del more
        self._run(self.ids[:, -tokens:].clone(), self.positions[:, -tokens:].clone())

    def skip(self, steps: int) -> None:
        """Run as many steps, at once where that leaves the same cache. A layer with a window keeps the storage of all
        tokens of the last forward, so the last step is one by itself."""
        alone = 0 if _keeps_every_token(self.cache) else 1
        if steps > alone:
            self.step(steps - alone)
        if steps and alone:
            self.step(1)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        keep: dict[str, Any] = {} if self.session.workload.all_logits else {"logits_to_keep": 1}
        mask = [] if self.mask is None else [self.mask]
        inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": self.cache, "use_cache": True, **keep}
        output = self.session.generate_with([self.positions], mask, **inputs)
        self.scores = scores_of(self.session, output)
        self.cache = output.past_key_values


def transduce(session: Session, config: Any, source: dict[str, torch.Tensor]) -> None:
    """Record encoding with the first decoding step as prefill, and the last decoding step."""
    new_tokens = session.workload.new_tokens or 0
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
        self.special = [session.ids(count) for count in _special_tokens(config, "decoder_start")]
        self.chosen: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.cache: Any = None

    def begin(self) -> None:
        """Encode the source and decode the first token."""
        encoder: Any = self.session.model.get_encoder()  # type: ignore[operator]
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
        self.cache = output.past_key_values


def scores_of(session: Session, output: Any) -> torch.Tensor | None:
    """Return the scores of the next token, the last logits in float32 on the inputs' device, and take their argmax."""
    logits = getattr(output, "logits", None)
    if logits is None or logits.dim() != 3:
        return None
    with session.recorder.at_inputs():
        scores: torch.Tensor = logits[:, -1, :].to(dtype=torch.float32, copy=True)
        scores.argmax(-1)
    return scores


def _special_tokens(config: Any, *more: str) -> list[int]:
    """Return how many ids each kind of special token has (bos, eos, pad, `more`); the loop keeps a tensor of each."""
    text = config.get_text_config(decoder=True)
    begin, end, pad, *rest = (getattr(text, f"{name}_token_id", None) for name in ("bos", "eos", "pad", *more))
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

    with _disable_current_modes(), torch.no_grad():
        state = torch.get_rng_state()
        model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes))
        model.register_forward_pre_hook(look, with_kwargs=True)
        ids = torch.zeros(1, 2, dtype=torch.long)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
        torch.set_rng_state(state)
    return any(seen)


def use_example(session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record one forward on fake copies of the given arguments."""
    args, kwargs = session.fake(tuple(args)), session.fake(dict(kwargs))

    def run() -> None:
        session.recorder.call(lambda: session.model(*args, **kwargs), (args, kwargs))

    session.phase("forward", 1, run)


def use_as_configured(session: Session) -> None:
    """Record the use that the model's config implies; nothing if it implies none."""
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
    """Record the use of a model that takes token ids: generation, encoder-decoder generation, or one forward."""
    work = session.workload
    if getattr(config, "is_encoder_decoder", False):
        transduce(session, config, {"input_ids": session.tokens(max(work.prompt_length, 1))})
    elif "past_key_values" in inspect.signature(session.model.forward).parameters and work.cache:
        generate(session, config)
    else:
        session.forward(work.context_length, input_ids=session.tokens(work.context_length))
