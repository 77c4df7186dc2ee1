"""The choice of the next token: tensors that `generate` computes of the last logits and keeps until its next choice.

Scores are processed, and tokens drawn, as the model's generation config has it: by temperature, top-k, top-p,
penalties, and tokens that are suppressed. Transformers' own processors run on fake tensors. Of beams, the scores, the
texts and the cache's new order are counted, as an upper bound.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch

from .session import Session

logger = logging.getLogger(__name__)

LEAST = ("min_length", "min_new_tokens")
"""Settings by which texts do not end early: planned as if they held in every step that is recorded."""

TEXTS = 5
"""Upper bound of the texts of each beam that are kept: going on, ended, and where both come from.
Twice as many more are there while the next ones are chosen."""

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns scores, given the token ids of the text and the scores so far."""


class Choice:
    """The tensors by which the last token was chosen.

    Args:
        session: the fake model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        config = settings_of(session)
        self._samples = bool(getattr(config, "do_sample", False))
        self._processors = processors_of(session, config)
        self._logits: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None
        self._probabilities: torch.Tensor | None = None
        self._beams = beams_of(session)
        self._texts = self._new_texts(TEXTS) if self._beams > 1 else None

    @property
    def is_made(self) -> bool:
        """Whether a token has been chosen."""
        return self._scores is not None

    def make(self, output: Any, ids: torch.Tensor) -> None:
        """Choose the token after `ids` by the last logits in the output of a forward, if it has any.

        The tensors behind the previous choice are freed as soon as `generate` computes its successor.
        """
        logits = getattr(output, "logits", None)
        if logits is None or logits.dim() != 3:
            return
        with self._session.recorder.at_inputs():
            self._logits = logits[:, -1, :].to(dtype=torch.float32, copy=True)
            if self._beams > 1:
                self._choose_beams(ids, self._logits)
                return
            self._scores = self._processed(ids, self._logits)
            if self._samples:
                self._probabilities = torch.softmax(self._scores, -1)
                torch.multinomial(self._probabilities, 1)
            else:
                self._scores.argmax(-1)

    def _choose_beams(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self._scores = torch.log_softmax(logits, -1)
        self._scores = self._processed(ids, self._scores)
        self._scores = self._scores + self._scores.new_empty(self._scores.shape[0], 1)
        by_text = self._scores.view(self._scores.shape[0] // self._beams, -1)
        best = torch.topk(by_text, 2 * self._beams)
        if self._samples:
            probabilities = torch.softmax(by_text, -1)
            drawn = torch.empty_like(probabilities)  # drawing without replacement works on a copy
            del probabilities, drawn
        texts = self._new_texts(2 * TEXTS)
        del best, texts

    def _new_texts(self, copies: int) -> torch.Tensor:
        """Return memory for `copies` texts of each beam, at full length."""
        with self._session.recorder.at_inputs():
            shape = copies, self._session.sequences, self._session.workload.context_length + 1
            return torch.zeros(shape, dtype=torch.long, device=self._session.device)

    def reorder(self, cache: Any) -> None:
        """Copy the keys and values of each layer, as when beams take each other's place: one tensor after the other."""
        if self._beams == 1 or cache is None:
            return
        parts = (cache, getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None))
        for layer in (layer for part in parts for layer in getattr(part, "layers", ())):
            for held in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(held, torch.Tensor) and held.numel():
                    with self._session.recorder.as_unit_of(held):
                        torch.empty_like(held)

    def renew(self) -> None:
        """Allocate the tensors of another step in place of the present ones."""
        with self._session.recorder.at_inputs():
            plain = self._scores is self._logits
            self._logits = None if self._logits is None else torch.empty_like(self._logits)
            self._scores = self._logits if plain or self._scores is None else torch.empty_like(self._scores)
            if self._probabilities is not None:
                self._probabilities = torch.empty_like(self._probabilities)

    def _processed(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            try:
                scores = processor(ids, scores)
            except Exception:  # fake tokens have no values, and any exception may follow: it writes into a copy
                scores = scores.clone()
        return scores


def beams_of(session: Session) -> int:
    """Return the number of beams of `generate` for each text, by the model's generation config."""
    config = getattr(session.model, "generation_config", None)
    return 1 if chooses_itself(session.model) else max(getattr(config, "num_beams", None) or 1, 1)


def settings_of(session: Session) -> Any:
    """Return the generation config by which tokens are chosen, with transformers' defaults; None without any."""
    model: Any = session.model
    own = getattr(model, "generation_config", None)
    if own is None:
        return None
    prepare = getattr(model, "_prepare_generation_config", None)
    try:
        config = copy.deepcopy(own) if prepare is None else prepare(None)[0]
    except Exception:  # a method that is not public, and may take other arguments
        config = copy.deepcopy(own)
    # Another forward, and a mark that is deprecated: neither is followed.
    config.guidance_scale = config.watermarking_config = None
    config.max_length = session.workload.context_length + 1
    if chooses_itself(model):
        config.do_sample = False
    return config


def processors_of(session: Session, config: Any) -> list[Processor]:
    """Return the processors of each token's scores by a generation config."""
    model: Any = session.model
    if config is None:
        return []
    if not chooses_itself(model):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None and any((getattr(config, name, None) or 0) > 0 for name in LEAST):
            config._eos_token_tensor = session.ids(len(ends) if isinstance(ends, list) else 1)
            config.min_length = session.workload.context_length + 1  # `generate` derives it from the new tokens, too
            if config.min_new_tokens:
                config.min_new_tokens = config.min_length
        try:
            length = session.workload.prompt_length
            names = "attention_mask", "decoder_attention_mask"
            given = {"device": session.device, "model_kwargs": dict.fromkeys(names, session.tokens(max(length, 1)))}
            found = model._get_logits_processor(config, length, **given)
            return [*found, *[_copied] * _read_the_source(config)]
        except Exception as error:  # a method that is not public: another version may take other arguments
            logger.debug("processors of %s: %s", type(model).__name__, error)
    return [_suppressing for _ in suppressed_tokens(model)]


def suppressed_tokens(model: Any) -> list[list[int]]:
    """Return the lists of tokens that `generate` never chooses, or not as the first."""
    settings = getattr(model, "generation_config", None)
    lists = (getattr(settings, name, None) for name in ("suppress_tokens", "begin_suppress_tokens"))
    return [each for each in lists if each is not None]


def chooses_itself(model: Any) -> bool:
    """Whether a model's own loop chooses tokens: Whisper's, greedily at first."""
    return hasattr(model, "generate_with_fallback")


def _read_the_source(config: Any) -> int:
    """Return how many processors look for tokens of the encoder's text, which are built with that text."""
    penalty = getattr(config, "encoder_repetition_penalty", None)
    repeats = getattr(config, "encoder_no_repeat_ngram_size", None)
    return (penalty not in (None, 1.0)) + bool(repeats)


def _copied(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.clone()


def _suppressing(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(torch.empty_like(tokens, dtype=torch.bool), -torch.inf, scores)
