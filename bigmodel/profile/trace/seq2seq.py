"""Generation with an encoder and a decoder: the forwards that `generate` of transformers runs, as in `generation`."""

from __future__ import annotations

from typing import Any

import torch

from .choice import Choice, beams_of
from .generation import ALTERNATIVE, FURTHER, cache_in, kept_ids
from .inputs import MASK, padding_mask
from .session import Session
from .values import real_tensors
from .work import tensors_in


def generate_seq2seq(session: Session, config: Any, source: dict[str, torch.Tensor]) -> None:
    """Record the encoder with the first decoding step as prefill, and the last decoding step.

    If any share of the context may be generated, a source text fills the context and two tokens follow (a token takes
    the same bytes of the cache on either side). Images and sounds take none of it, so the whole context is generated.
    If the workload is padded, the same forwards with padding of a text are recorded too.

    Args:
        session: the fake model.
        config: its config.
        source: fake inputs of the encoder by name.
    """
    new_tokens = session.workload.new_tokens
    if new_tokens is None:
        new_tokens = 2 if "input_ids" in source else session.workload.context_length
    length = max(session.workload.prompt_length, 1)
    pads = "input_ids" in source and session.workload.padded and session.accepts(MASK)
    if pads:
        session.phase(FURTHER, length, _Seq2SeqLoop(session, config, source, is_padded=True).begin)
    loop = _Seq2SeqLoop(session, config, source)
    session.phase("prefill", length, loop.begin)
    if new_tokens > 1:
        loop.skip(new_tokens - 2)
        session.phase("decode", 1, lambda: loop.step(1))
        if pads:
            loop = _Seq2SeqLoop(session, config, source, is_padded=True)
            loop.begin()
            loop.skip(new_tokens - 2)
            session.phase(ALTERNATIVE, 1, lambda: loop.step(1))


class _Seq2SeqLoop:
    """The loop of `generate`, with the tensors that it keeps between forwards."""

    def __init__(self, session: Session, config: Any, source: dict[str, torch.Tensor], is_padded: bool = False) -> None:
        self.session = session
        self.source = source
        # The caller's mask of the source stays alive; the model is called without it if it is all ones.
        self.mask = session.tokens(next(iter(source.values())).shape[1]) if "input_ids" in source else None
        self.masks: dict[str, Any] = {}
        if is_padded and self.mask is not None:
            with real_tensors():
                session.recorder.values.give(self.mask, padding_mask(*self.mask.shape))
            self.masks[MASK] = self.mask
        self.special = kept_ids(session, config)
        self.chosen: torch.Tensor | None = None
        self.choice = Choice(session)
        self.cache: Any = None

    def begin(self) -> None:
        """Run the encoder on the source, and the first decoding step."""
        encoder: Any = self.session.model.get_encoder()  # type: ignore[operator]
        first = 1
        if hasattr(self.session.model, "generate_with_fallback"):  # Whisper's own loop copies each segment of a sound
            generation = self.session.model.generation_config
            first = _first_tokens(generation)
            self.first_tokens = [self.session.tokens(first), self.session.tokens(first)]  # given, and of this segment
            self.source = {name: tensor.clone() for name, tensor in self.source.items()}
        self.session.sequences = self.session.workload.batch_size
        self.encoded = encoder(**self.source, **self.masks)
        self._repeat(beams_of(self.session))
        self.ids = self.start = self.session.tokens(first)
        self.unfinished = self.session.tokens(1)
        self._run(self.ids.clone())

    def _repeat(self, beams: int) -> None:
        """Repeat what the encoder returned, and its mask, for each beam."""
        if beams == 1:
            return
        self.session.sequences *= beams
        for name, value in self.encoded.items():
            if isinstance(value, torch.Tensor):
                self.encoded[name] = value.repeat_interleave(beams, 0)
        self.masks = {name: mask.repeat_interleave(beams, 0) for name, mask in self.masks.items()}

    def skip(self, steps: int) -> None:
        """Leave what `steps` steps leave, in one forward."""
        if steps > 0:
            self.step(steps)

    def step(self, tokens: int) -> None:
        """Run the forward of `tokens` more tokens at once: 1, or as many as there are steps to skip."""
        self.chosen, more = self.session.tokens(1), self.session.tokens(tokens)
        self.ids = torch.cat([self.ids, more], 1)
        del more
        self._run(self.ids[:, -tokens:].clone())

    def _run(self, ids: torch.Tensor) -> None:
        output = self.session.generate_with(
            [*tensors_in(self.encoded), *self.masks.values()],
            **self.masks,
            encoder_outputs=self.encoded,
            decoder_input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.choice.make(output, self.ids)
        self.cache = cache_in(output)
        self.choice.reorder(self.cache)


def _first_tokens(generation: Any) -> int:
    """Return how many tokens Whisper's decoder begins with: start, language and task, no timestamps."""
    named = 2 if getattr(generation, "lang_to_id", None) else 0
    return 1 + named + (getattr(generation, "no_timestamps_token_id", None) is not None)
