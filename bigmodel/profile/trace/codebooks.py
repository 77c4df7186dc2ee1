"""Generation of sounds by a text encoder, a decoder of several codebooks, and a codec that turns codes into samples.

Musicgen and Musicgen Melody generate a token of each codebook in every step, delayed by one step from codebook to
codebook, and decode them when all are there. With a guidance scale, the decoder computes each sequence twice: with the
text, and without. The methods by which their own `generate` prepares inputs run on fake tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .generation import ALTERNATIVE, cache_in, kept_ids
from .inputs import MASK, SAMPLES, Inputs, padding_mask, parameters_of, sample
from .session import Session
from .values import real_tensors
from .work import tensors_in

PADDING = "padding_mask"
"""What the processor of sounds returns beside them: which samples are padding."""

PREPARES = ("_prepare_text_encoder_kwargs_for_generation", "_prepare_encoder_hidden_states_kwargs_for_generation")
"""Methods that run the text encoder: Musicgen's, Musicgen Melody's."""

HELD = ("encoder_outputs", "encoder_hidden_states")
"""What they return for the decoder."""


def generates_codes(model: Any) -> bool:
    """Whether a model with an audio encoder generates codes of several codebooks and decodes them to a sound."""
    delays = hasattr(getattr(model, "decoder", None), "build_delay_pattern_mask")
    return delays and hasattr(model.audio_encoder, "decode") and _prepare_method(model) is not None


def sounds_of(model: Any, batch_size: int) -> Iterator[Inputs]:
    """Yield the sound to go on from, or the melody, that a model takes beside a text."""
    accepted = parameters_of(model)
    if "input_values" in accepted:
        channels = model.decoder.config.audio_channels
        yield {"input_values": sample(batch_size, channels, SAMPLES), PADDING: torch.ones(batch_size, SAMPLES).long()}
    elif "input_features" in accepted:
        yield {"input_features": sample(batch_size, model.config.chroma_length, model.config.num_chroma)}


def generate_sound(session: Session, config: Any, source: dict[str, torch.Tensor]) -> None:
    """Record the text encoder with the first decoding step, the last decoding step, and the decoding of all codes.

    If any share of the context may be generated, text and codes each have its full length.

    Args:
        session: the fake model.
        config: its config.
        source: fake token ids of the text by name, and the sound to go on from or the melody, if there is one.
    """
    work = session.workload
    new_tokens = work.context_length if work.new_tokens is None else work.new_tokens
    loop = _CodesLoop(session, config, source, max(new_tokens, 1))
    session.phase("prefill", max(work.prompt_length, 1), loop.begin)
    if new_tokens > 1:
        loop.skip(new_tokens - 2)
        session.phase("decode", 1, lambda: loop.step(1))
    session.phase(ALTERNATIVE, 1, loop.decode)


class _CodesLoop:
    """The loop of `generate`, with the tensors that it keeps between forwards."""

    def __init__(self, session: Session, config: Any, source: dict[str, torch.Tensor], new_tokens: int) -> None:
        self.session = session
        model: Any = session.model
        self.model = model
        self.settings = model.generation_config
        self.source = source["input_ids"]
        self.sound = source.get("input_values")
        self.padding = {PADDING: source[PADDING]} if PADDING in source else {}
        self.melody = source.get("input_features")
        with real_tensors():
            shape = [*self.source.shape]
            mask = padding_mask(*shape) if session.workload.padded else torch.ones(shape, dtype=torch.long)
        self.mask = session.tokens(shape[1], mask)
        self.new_tokens = new_tokens
        self.special = kept_ids(session, config)
        self.codebooks: int = model.decoder.num_codebooks
        self.held: dict[str, Any] = {}
        self.scores: torch.Tensor | None = None
        self.cache: Any = None
        self.first: Any = None  # what an earlier forward returned, with its cache: `generate` keeps it to the end

    def begin(self) -> None:
        """Run the text encoder, and the first decoding step."""
        prepare: Any = _prepare_method(self.model)
        given = {MASK: self.mask, "use_cache": True}
        if self.melody is not None:
            given["input_features"] = self.melody
        self.held = prepare(self.source, given, "input_ids", self.settings)
        sequences = self.session.sequences * self.codebooks
        self.unfinished = self.session.ids(sequences)
        self.ids = torch.zeros(sequences, 1, dtype=torch.long, device=self.session.device)
        if self.sound is not None:
            given = {**self.held, **self.padding}
            self.held = self.model._prepare_audio_encoder_kwargs_for_generation(self.sound, given)
            self.ids = torch.cat([self.ids, self.held.pop("decoder_input_ids")], 1)
        length = self.ids.shape[1] + self.new_tokens
        self.delays = torch.zeros(sequences, length, dtype=torch.long, device=self.session.device)
        if _computes_prompt_twice(self.model):
            self.first = self._run(self.ids.shape[1], is_first=True)
            self.cache = None
        self._run(self.ids.shape[1], is_first=True)

    def skip(self, steps: int) -> None:
        """Leave what `steps` steps leave, in one forward."""
        if steps > 0:
            self.step(steps)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens of each codebook."""
        self._append(tokens)
        self._run(tokens)

    def _append(self, tokens: int) -> None:
        chosen = torch.zeros(self.ids.shape[0], tokens, dtype=torch.long, device=self.session.device)
        self.ids = torch.cat([self.ids, chosen], 1)

    def decode(self) -> None:
        """Turn the codes into sounds; beside them are the text's states, and the cache that `generate` keeps."""
        if self.first is not None:
            self.cache = None  # it keeps the other one
        self._append(1)  # the last token, which is not read
        shape = 1, self.session.sequences, self.codebooks, self.ids.shape[1]
        codes = torch.zeros(shape, dtype=torch.long, device=self.session.device)
        sides = range(2) if self.model.decoder.config.audio_channels == 2 else range(1)
        scales = [None] * self.session.sequences
        found = [self.model.audio_encoder.decode(codes[:, :, side :: len(sides)], scales)[0] for side in sides]
        if len(found) > 1:
            found.append(torch.cat(found, 1))

    def _run(self, tokens: int, is_first: bool = False) -> Any:
        inputs = self.model.prepare_inputs_for_generation(
            self.ids,
            next_sequence_length=tokens,
            past_key_values=self.cache,
            is_first_iteration=is_first,
            decoder_delay_pattern_mask=self.delays,
            guidance_scale=self.settings.guidance_scale,
            **self.held,
        )
        kept = tensors_in([self.held.get(name) for name in (*HELD, MASK)])
        output = self.session.generate_with(kept, **inputs)
        self.cache = cache_in(output)
        with self.session.recorder.at_inputs():
            scores = output.logits[:, -1, :].to(dtype=torch.float32, copy=True)
            if scores.shape[0] > self.ids.shape[0]:
                scores = scores[: self.ids.shape[0]] + scores[self.ids.shape[0] :]
            self.scores = scores
        return output


def _computes_prompt_twice(model: Any) -> bool:
    """Whether the model's own `generate` computes the prompt, as that of some versions of transformers does, before the
    loop that it calls computes it again, with a cache of its own."""
    return "_prefill" in inspect.unwrap(type(model).generate).__code__.co_names


def _prepare_method(model: Any) -> Any:
    return next((getattr(model, name) for name in PREPARES if hasattr(model, name)), None)
