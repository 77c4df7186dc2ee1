"""Generation with a decoder: the forwards that `generate` of transformers runs, and the tensors it keeps between them.

Every forward gets position ids of its own for each sequence, so rotary tables are computed for each. Token ids, mask,
position ids and the last scores stay alive while the next forward runs.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from .choice import Choice, beams_of, chooses_itself, suppressed_tokens
from .grouped_attention import attention_by_group
from .image_states import image_states_in, inputs_of_step
from .inputs import MASK, modalities, padding_mask, token_ids
from .prompt import KINDS, Prompt
from .session import Session
from .values import real_tensors
from .work import tensors_in

FROM_HOST = "decode, on the host"
"""Name of the phase that replaces the decode phase if the model's main device is the host."""

FURTHER = "further forwards"
"""Name of forwards that belong to the phase after them, such as the decode step before a window is full."""

ALTERNATIVE = "the same forward, with padding"
"""Name of forwards that belong to the phase before them: of padded sequences, whose mask may take more memory."""

NEXT_LENGTH = "next_sequence_length"
"""Argument in which `generate` says how many tokens at the end of the text a forward is to get."""

CACHES = ("past_key_values", "cache_params")
"""Argument names of a forward's cache: of keys and values, or of recurrent states."""


def generate(session: Session, config: Any, media: Mapping[str, torch.Tensor] | None = None) -> None:
    """Record the prefill, and the last decoding step, at which the cache holds all tokens but one.

    Once a sliding window is full, kernels receive a mask and may take less memory than in the step before, so that step
    is recorded too. So is the first step after a prompt that is longer than a window, beside which the cache keeps the
    storage of the whole prompt, and so are the same forwards with padding, if the workload is padded or a mask is given
    that says so.

    Args:
        session: the fake model.
        config: its config.
        media: images and sounds in the prompt, or token ids and their mask. The prompt includes their placeholders,
            and is longer than the workload's if these need more tokens.
    """
    work, beams = session.workload, beams_of(session)
    session.sequences *= beams
    if media is not None and beams > 1:
        media = {name: each.repeat_interleave(beams, 0) for name, each in media.items()}
    given = None if media is None else Prompt.with_media(session, config, media, work.prompt_length)
    prompt = max(work.prompt_length, 1) if given is None else given.ids.shape[1]
    has_mask = given is not None and given.mask is not None
    pads = (work.padded or has_mask) and session.accepts(MASK)
    chunk = work.prefill_chunk_size
    if chunk is not None and (chunk >= prompt or given is not None or not _is_given_a_cache(session, config)):
        chunk = None
    if pads:
        _record_prompt(_Loop(session, config, prompt, given, is_padded=True), chunk, [FURTHER] * 3)
    loop = _Loop(session, config, prompt, given)
    _record_prompt(loop, chunk, [FURTHER, "prefill", ALTERNATIVE])
    if work.new_tokens == 0 or work.context_length < 2:
        return
    if given is not None:
        loop.skip(prompt + (work.new_tokens or 1) - 1 - loop.ids.shape[1])
    elif work.new_tokens is None:
        begun = _Loop(session, config, work.context_length - 1)
        if loop.can_resize():
            loop = _resumed(begun, loop, begun.prompt)
        else:
            loop = begun
            loop.prefill()
    else:
        for window in _windows(loop.cache):
            if loop.ids.shape[1] + 1 < window <= work.context_length:
                loop.skip(window - 2 - loop.ids.shape[1])
                _record_step(loop)
        loop.skip(work.context_length - 1 - loop.ids.shape[1])
    with as_when_decoding(session.model):
        settings = _experts_functions(session.model)
        session.phase("decode", 1, lambda: loop.step(1))
    if _experts_functions(session.model) != settings and given is None:
        loop = _before_last_step(session, config, loop)
        session.phase(FROM_HOST, 1, lambda: loop.step(1))
    if pads:
        loop = _before_last_step(session, config, loop, given, is_padded=True)
        with as_when_decoding(session.model):
            session.phase(ALTERNATIVE, 1, lambda: loop.step(1))


def _record_prompt(loop: _Loop, chunk: int | None, names: list[str]) -> None:
    """Record the forward of a prompt, or some of those that it is run in, and the first step if it may take more memory
    than those that are recorded after it; arguments as for `_prefill_in_chunks`."""
    if chunk is None:
        loop.session.phase(names[1], loop.prompt, loop.prefill)
    else:
        _prefill_in_chunks(loop, chunk, names)
    if (loop.session.workload.new_tokens or 1) > 1 and _keeps_more_than_it_holds(loop.cache):
        _record_step(loop)


def _record_step(loop: _Loop) -> None:
    """Record a decoding step before the last."""
    with as_when_decoding(loop.session.model):
        loop.session.phase(FURTHER, 1, lambda: loop.step(1))


def _prefill_in_chunks(loop: _Loop, chunk: int, names: list[str]) -> None:
    """Record some of the forwards that a prompt is run in: the first, which attends to nothing before it, one in the
    middle, which takes as long as the mean, and the last full one, which takes the most memory, with the rest after it.

    Args:
        chunk: tokens of each.
        names: names of the phases of what comes before the forward in the middle, of that, and of what comes after it.
    """
    full, session = loop.prompt // chunk, loop.session
    middle = full // 2
    for number in sorted({0, middle, full - 1}):
        loop.fill(number * chunk)
        name = names[1 + (number > middle) - (number < middle)]
        session.phase(name, chunk, partial(loop.prefill_part, number * chunk, (number + 1) * chunk))
    if full * chunk < loop.prompt:
        session.phase(names[2], chunk, partial(loop.prefill_part, full * chunk, loop.prompt))


def reads_whole_text(model: Any) -> bool:
    """Return whether forwards of a model get the whole text beside the cache, and leave out themselves what that holds,
    as CPM-Ant's: its method that prepares inputs takes the length that `generate` asks for, and does not use it."""
    prepare = vars(type(model)).get("prepare_inputs_for_generation")
    code = getattr(prepare, "__code__", None)
    if code is None or NEXT_LENGTH not in code.co_varnames:
        return False
    read = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_FAST")]
    return not any(NEXT_LENGTH in (names if isinstance(names, tuple) else (names,)) for names in read)


def _before_last_step(
    session: Session, config: Any, loop: _Loop, given: Prompt | None = None, is_padded: bool = False
) -> _Loop:
    """Return a loop as it was before the last step, which `loop` has run."""
    work = session.workload
    new_tokens = work.new_tokens or 1
    prompt = work.context_length - new_tokens if given is None else given.ids.shape[1]
    begun = _Loop(session, config, prompt, given, is_padded)
    if not loop.can_resize():
        begun.prefill()
        begun.skip(new_tokens - 1)
        return begun
    return _resumed(begun, loop, loop.ids.shape[1] - 1)


def _resumed(begun: _Loop, loop: _Loop, length: int) -> _Loop:
    """Return `begun`, which has run nothing, with a cache of `length` tokens made from that of `loop` without a
    forward."""
    begun.cache, begun.choice, begun.image_states = loop.cache, loop.choice, loop.image_states
    begun.encoded = loop.encoded
    if length > begun.prompt:
        begun.append(length - begun.prompt)
    begun.resize(length)
    return begun


def _filled_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold anything; those of blocks that were not sampled are empty."""
    return [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_initialized", True)]


def _windows(cache: Any) -> list[int]:
    """Return the sliding windows of a cache's layers, in tokens, ascending. A static layer has room for its window."""
    layers = [layer for layer in _filled_layers(cache) if getattr(layer, "is_sliding", False)]
    windows = {getattr(layer, "sliding_window", None) or getattr(layer, "max_cache_len", None) for layer in layers}
    return sorted(window for window in windows if isinstance(window, int))


def _keeps_every_token(cache: Any) -> bool:
    """Return whether every layer of a cache holds the keys and values of all tokens."""
    from transformers.cache_utils import DynamicLayer

    layers = _filled_layers(cache)
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _keeps_more_than_it_holds(cache: Any) -> bool:
    """Return whether a layer's keys are a view of more tokens than it holds, as a window's after a longer prompt."""
    keys = [getattr(layer, "keys", None) for layer in _filled_layers(cache)]
    return any(isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() > each.nbytes for each in keys)


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

LENGTHENED = ("token_type_ids", "mm_token_type_ids")
"""Inputs that say of each token whether it is a placeholder, which `generate` lengthens with the text."""

ENCODED_PIXELS = {"pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches"}
"""Inputs that `generate` encodes."""


class _Loop:
    """The loop of `generate`, with the tensors that it keeps between forwards."""

    def __init__(
        self, session: Session, config: Any, prompt: int, given: Prompt | None = None, is_padded: bool = False
    ) -> None:
        self.session = session
        self.prompt, self.covered, self.is_padded = prompt, prompt, is_padded
        with real_tensors():
            ids = token_ids(config, session.sequences, prompt) if given is None else given.ids
        self.media = {} if given is None else given.media
        self.padding = None if given is None else given.mask
        self.plain = 0 if given is None else given.plain
        self.ids = session.tokens(prompt, ids)
        # The caller keeps its own tensors alive beside the longer ones of the loop. The loop may have no mask.
        mask = session.tokens(prompt, self._mask(prompt))
        self.positions = self._first_positions(mask) if session.accepts("position_ids") else None
        self.given = self.ids, mask, self.positions
        self.mask = mask if is_padded or keeps_mask() else None
        self.unfinished = session.tokens(1)
        self.chosen: torch.Tensor | None = None
        self.before: Any = None  # output of the last forward, while those of a prompt follow each other
        self.image_states: torch.Tensor | None = None
        self.encoded: Mapping[str, Any] = {}
        self.kinds = {name: self.media[name] for name in LENGTHENED if name in self.media}
        self.special = kept_ids(session, config)
        self.choice = Choice(session)
        self.caches = _uses_cache(session)
        self.filled = 0  # tokens of the prompt that the cache holds, where it is run in chunks
        self.cache = _new_cache(session, config) if self.caches else None

    def _first_positions(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the position ids of the prompt: one for each token, or as many as a model of its own kind has."""
        if not has_own_positions(self.session.model):
            return self.session.tokens(self.prompt, self._order(self.prompt))
        known = {"attention_mask": mask, **self.media}
        found: torch.Tensor = self.session.model._prepare_position_ids_for_generation(self.ids, known)  # type: ignore[operator]
        return found

    def prefill(self) -> None:
        """Run the forward of the whole prompt."""
        media, self.encoded = encode_media(self.session, self.media)
        encoded = {ENCODED: self.encoded} if self.encoded else {}
        self._run(self.ids.clone(), self.positions, None, None, **media, **encoded)

    def prefill_part(self, begin: int, end: int) -> None:
        """Run the forward of the tokens of the prompt from `begin` to `end`; those before it are in the cache."""
        positions = None if self.positions is None else self.positions[..., begin:end]
        kinds = {name: kind[:, :end] for name, kind in self.kinds.items()}
        self.filled = end
        with attention_by_group(self.session.model):
            self._run(self.ids[:, begin:end].clone(), positions, kinds, until=end)

    def fill(self, tokens: int) -> None:
        """Let the cache hold the first `tokens` tokens of the prompt: without a forward if it can be resized."""
        if self.filled == tokens:
            return
        if self.can_resize(self.filled):
            self._resize_cache(tokens)
            self.filled = tokens
        else:
            self.prefill_part(self.filled, tokens)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip.

        Without a cache, it reads the whole text again.
        """
        self.append(tokens)
        if not self.caches:
            self._run(self.ids.clone(), self.positions, None, None, **self.kinds)
            return
        if reads_whole_text(self.session.model):
            self._run(self.ids.clone(), self.positions, self.kinds)
            return
        positions = None if self.positions is None else self.positions[..., -tokens:].clone()
        seen = inputs_of_step(self.session, self.media, self.image_states, tokens) if self.media else {}
        kinds = {name: kind[:, -tokens:].clone() for name, kind in self.kinds.items()}
        self._run(self.ids[:, -tokens:].clone(), positions, kinds, None, **seen)

    def append(self, tokens: int) -> None:
        """Append `tokens` chosen tokens to the text."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids = torch.cat([self.ids, more], 1)
        self._cover(self.ids.shape[1])

    def _cover(self, tokens: int) -> None:
        """Let position ids, mask and kinds of tokens cover the first `tokens` tokens; `generate` lengthens them as soon
        as a forward has returned, before it chooses the next token."""
        if tokens <= self.covered:
            return
        more, self.covered = self.session.tokens(tokens - self.covered), tokens
        if self.positions is not None:
            self.positions = torch.cat([self.positions, more.expand(*self.positions.shape[:-1], -1)], -1)
            with real_tensors():
                order = self._order(tokens).expand(self.positions.shape)
            self.session.recorder.values.give(self.positions, order)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, more], 1)
            self.session.recorder.values.give(self.mask, self._mask(tokens))
        for name, kind in self.kinds.items():
            value = self.session.recorder.values.of(kind)
            self.kinds[name] = torch.cat([kind, more], 1)
            if value is not None:
                with real_tensors():
                    value = torch.cat([value, value.new_zeros(*more.shape)], 1)
                self.session.recorder.values.give(self.kinds[name], value)

    def can_resize(self, tokens: int | None = None) -> bool:
        """Return whether the cache holds keys and values of the whole text, or of its first `tokens` tokens: no sliding
        windows or recurrent states."""
        layers, tokens = _filled_layers(self.cache), self.ids.shape[1] if tokens is None else tokens
        return _keeps_every_token(self.cache) and all(layer.get_seq_length() == tokens for layer in layers)

    def resize(self, tokens: int) -> None:
        """Let the cache hold `tokens` tokens, in new storages, and allocate new scores, as forwards would."""
        self._resize_cache(tokens)
        self._cover(tokens + 1)
        self.choice.renew()

    def _resize_cache(self, tokens: int) -> None:
        for layer in _filled_layers(self.cache):
            for name in ("keys", "values"):
                held = getattr(layer, name)
                with self.session.recorder.as_unit_of(held):
                    setattr(layer, name, held.new_empty((*held.shape[:-2], tokens, held.shape[-1])))
                del held

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
            return torch.arange(tokens).repeat(self.session.sequences, 1)

    def _mask(self, tokens: int) -> torch.Tensor:
        """Return the mask of the first `tokens` tokens of each sequence."""
        with real_tensors():
            batch_size = self.session.sequences
            if self.is_padded and self.padding is not None:
                generated = torch.ones(batch_size, tokens - self.prompt, dtype=torch.long)
                return torch.cat([self.padding, generated], 1)
            return padding_mask(batch_size, tokens, self.prompt if self.is_padded else 0, self.plain)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        kinds: Mapping[str, torch.Tensor] | None = None,
        until: int | None = None,
        **media: Any,
    ) -> None:
        """Run a forward, and choose the next token unless it ends before the prompt does.

        Args:
            ids: the tokens that it computes.
            positions: their position ids.
            kinds: kinds of tokens.
            until: tokens of the text up to their end; None: all.
            media: images and sounds.
        """
        keep: dict[str, Any] = {} if self.session.workload.all_logits else {"logits_to_keep": 1}
        mask = [] if self.mask is None else [self.mask]
        seen = self.mask if self.mask is None or until is None else self._mask_until(until)
        masked = dict.fromkeys([MASK] if self.is_padded else [], seen)
        cache = dict.fromkeys(CACHES, self.cache) if self.caches else {}
        order = {} if positions is None else {"position_ids": positions}
        given = {**masked, **order, **cache, "use_cache": self.caches, **(kinds or {})}
        inputs = {"input_ids": ids, **given, **keep, **media}
        if prepares_its_inputs(self.session.model):
            inputs |= self._prepared({**given, **{name: media[name] for name in KINDS if name in media}}, ids)
        kept = [*tensors_in(media), *([] if self.positions is None else [self.positions])]
        if self.is_padded and seen is not None:
            kept = [*kept, seen]
        kept, unread = (kept, [] if until is None else mask) if self.is_padded else (kept, mask)
        output = self.session.generate_with(kept, unread, **inputs)
        if until is not None and until < self.prompt:
            self.before = output
            returned = cache_in(output)
            self.cache = self.cache if returned is None else returned
            return
        self.before = None
        if not self.choice.is_made:
            inputs = {}
        del given, kinds, masked, order, mask, kept, unread, positions, ids
        # `generate` frees the inputs of the prefill here, and those of a step once the next one's are made.
        self._cover(self.ids.shape[1] + 1)
        self.image_states = image_states_in(self.session, output) if self.media else None
        self.choice.make(output, self.ids)
        self._append_chosen()
        returned = cache_in(output)
        self.cache = self.cache if returned is None else returned
        self.choice.reorder(self.cache)

    def _mask_until(self, tokens: int) -> torch.Tensor:
        """Return the mask of the first `tokens` tokens, a view."""
        assert self.mask is not None
        found = self.mask[:, :tokens]
        with real_tensors():
            value = self._mask(self.prompt)[:, :tokens]
        self.session.recorder.values.give(found, value)
        return found

    def _append_chosen(self) -> None:
        """Append the next token for a moment: `generate` does so before it frees the output of the forward."""
        with self.session.recorder.at_inputs():
            torch.cat([self.ids, self.session.tokens(1)], 1)

    def _prepared(self, inputs: Mapping[str, Any], ids: torch.Tensor) -> dict[str, Any]:
        """Return the mask, the position ids and the kinds of tokens that the model's own preparation of inputs makes of
        those given."""
        prepare: Any = self.session.model.prepare_inputs_for_generation
        accepted = {name: value for name, value in inputs.items() if self.session.accepts(name)}
        found = prepare(ids, is_first_iteration=not self.choice.is_made, **accepted)
        return {name: found.get(name) for name in (MASK, "position_ids", *KINDS) if name in accepted}


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


def kept_ids(session: Session, config: Any) -> list[torch.Tensor]:
    """Return the token ids that `generate` keeps as tensors, without the text: its special tokens (bos, eos, pad, the
    decoder's first), and those that Whisper's own loop suppresses or ends a text of full length with. Elsewhere the
    processors of scores hold such ids. Where no config says which token ends a text, as CPM-Ant's, callers do."""
    generation = getattr(session.model, "generation_config", None)
    named = [generation, config.get_text_config(decoder=True)]

    def ids_of(name: str, *settings: Any) -> Any:
        return next((value for each in settings if (value := getattr(each, name, None)) is not None), None)

    begin, end, pad = (ids_of(f"{kind}_token_id", *named) for kind in ("bos", "eos", "pad"))
    end = 0 if end is None else end  # whichever it is
    seq2seq = getattr(config, "is_encoder_decoder", False)
    first = ids_of("decoder_start_token_id", *(named if seq2seq else [generation]))
    kinds = [begin, end, end if pad is None else pad, first]
    if chooses_itself(session.model):
        kinds += [getattr(generation, "forced_eos_token_id", None), *suppressed_tokens(session.model)]
    return [session.ids(len(kind) if isinstance(kind, list) else 1) for kind in kinds if kind is not None]


def has_own_positions(model: Any) -> bool:
    """Return whether a model makes position ids for `generate` itself, as for the rows and columns of images."""
    return _overrides(model, "_prepare_position_ids_for_generation")


def prepares_its_inputs(model: Any) -> bool:
    """Return whether a model prepares the inputs of each forward of `generate` itself: some pass no mask in steps."""
    return _overrides(model, "prepare_inputs_for_generation")


def _overrides(model: Any, method: str) -> bool:
    from transformers import GenerationMixin

    general = getattr(GenerationMixin, method, None)
    own = getattr(type(model), method, None)
    if general is None or own is None or own is general:
        return False
    return "is_first_iteration" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


def _uses_cache(session: Session) -> bool:
    """Return whether `generate` lets the model keep keys and values, or states."""
    return getattr(getattr(session.model, "generation_config", None), "use_cache", None) is not False


def _is_given_a_cache(session: Session, config: Any) -> bool:
    """Return whether `generate` gives the model an empty cache, without which it runs no prompt in chunks."""
    return _uses_cache(session) and _new_cache(session, config) is not None


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
