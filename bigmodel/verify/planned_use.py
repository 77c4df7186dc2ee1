"""Runs a loaded model on its planned workload: text generation, sequence to sequence, or one forward."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import torch_device
from ..errors import PlanError
from ..plan import Plan
from ..profile import as_when_decoding, image_shape, padding_mask, sound_shape
from ..profile.trace.generation import CACHES
from ..profile.trace.inputs import token_types

Run = Callable[[], object]

NEVER = 2**31
"""An end-of-sequence id that no model returns, so that generation continues to its planned length."""


@dataclass(frozen=True)
class PlannedUse:
    """The workload of a plan, as callables.

    Attributes:
        whole: runs the whole workload, with and without padding if both are planned; its peak memory is the predicted
            one.
        passes: the passes whose time the plan predicts, by name, in its order: prompt and step, or a single forward.
        inputs: bytes of the input tensors, which exist before the run.
    """

    whole: Run
    passes: Mapping[str, Run]
    inputs: int


def planned_use(model: Any, found: Plan) -> PlannedUse:
    """Return the planned workload of `model`, which was loaded by plan `found`.

    Raises:
        PlanError: the input format of the model is unknown.
    """
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        return _forward(model, {name: _zeros(model, found, *image_shape(config))})
    if name == "input_features":
        return _seq2seq(model, found, {name: _zeros(model, found, *sound_shape(config))})
    if name != "input_ids":
        raise PlanError(
            f"{type(model).__name__} takes {name!r}; only models of text, images and sounds can be verified"
        )
    if getattr(config, "is_encoder_decoder", False):
        return _seq2seq(model, found, {name: _tokens(model, found, found.context_length - (found.new_tokens or 0))})
    if model.can_generate():
        return _generate(model, found)
    ids = _tokens(model, found, found.context_length)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    types = {key: each.to(ids.device) for key, each in token_types(model, *ids.shape).items()}
    return _forward(model, {name: ids, **types}, lambda: _masks(found, ids) if takes_mask else ())


def _forward(
    model: Any, inputs: Mapping[str, torch.Tensor], masks: Callable[[], Iterable[torch.Tensor]] = tuple
) -> PlannedUse:
    """Return one forward, and for the peak of memory also those with `masks`."""

    def run() -> None:
        model(**inputs)

    def whole() -> None:
        run()
        for mask in masks():
            model(**inputs, attention_mask=mask)

    return PlannedUse(whole, {"forward": run}, sum(tensor.nbytes for tensor in inputs.values()))


def _generate(model: Any, found: Plan) -> PlannedUse:
    new_tokens = found.new_tokens or 1
    ids = _tokens(model, found, max(found.context_length - new_tokens, 1))

    def whole() -> None:
        # `generate` does not feed the last token to the model.
        for mask in _masks(found, ids):
            _generate_with(model, new_tokens + 1, attention_mask=mask, input_ids=ids)

    accepted = inspect.signature(model.forward).parameters
    cached = next((name for name in CACHES if name in accepted), CACHES[0])
    last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def forward(tokens: torch.Tensor, cache: Any = None) -> Any:
        return getattr(model(input_ids=tokens, **{cached: cache}, use_cache=True, **last), cached)

    words = itertools.cycle(range(ids.shape[1]))

    def step(cache: Any) -> None:
        word = next(words)  # a repeated token would be routed to the same experts every time
        with as_when_decoding(model):
            forward(ids[:, word : word + 1], cache)

    passes = _with_step(lambda: forward(ids), step, found)
    return PlannedUse(whole, passes, ids.nbytes)


def _seq2seq(model: Any, found: Plan, source: dict[str, torch.Tensor]) -> PlannedUse:
    count = found.new_tokens or 1

    def whole() -> None:
        if "input_ids" not in source:
            _generate_with(model, count, **source)
            return
        for mask in _masks(found, source["input_ids"]):
            _generate_with(model, count, **source, attention_mask=mask)

    def begin() -> Any:
        output = model(**source, decoder_input_ids=_tokens(model, found, 1), use_cache=True)
        return output.past_key_values, (output.encoder_last_hidden_state,)

    def step(begun: Any) -> None:
        cache, encoded = begun
        last = _tokens(model, found, 1)
        model(encoder_outputs=encoded, decoder_input_ids=last, past_key_values=cache, use_cache=True)

    return PlannedUse(whole, _with_step(begin, step, found), sum(tensor.nbytes for tensor in source.values()))


def _with_step(begin: Callable[[], Any], step: Callable[[Any], object], found: Plan) -> dict[str, Run]:
    """Return the passes that the plan predicts; every step continues from one prompt, which is run on first use."""
    begun: list[Any] = []

    def one_step() -> None:
        if not begun:
            begun.append(begin())
        step(begun[0])

    steps: dict[str, Run] = {"prompt": begin, "step": one_step}
    if found.prediction is not None and found.prediction.prefill is None:
        del steps["step"]
    return steps


def _generate_with(model: Any, new_tokens: int, **inputs: Any) -> None:
    """Generate as the generation config has it, which is what is planned: by sampling or beams, if it says so."""
    asked: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": NEVER, "pad_token_id": 0}
    with warnings.catch_warnings():
        # The embedding may be on the host; the dispatched model accepts inputs on any device.
        warnings.filterwarnings("ignore", message="You are calling .generate")
        model.generate(**inputs, **asked)


def _masks(found: Plan, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the masks of token ids that were planned: of ones, and with padding."""
    for prompt in (0, None) if found.padded else (0,):
        yield padding_mask(ids.shape[0], ids.shape[1], prompt).to(ids.device)


def _tokens(model: Any, found: Plan, length: int) -> torch.Tensor:
    """Return token ids on the main device: int64, (batch, `length`)."""
    words = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(found.batch_size * length).reshape(found.batch_size, length) % words
    return ids.to(torch_device(found.main_device))


def _zeros(model: Any, found: Plan, *shape: int) -> torch.Tensor:
    """Return samples in the model's dtype on the main device: (batch, *shape)."""
    return torch.zeros(found.batch_size, *shape, dtype=model.dtype).to(torch_device(found.main_device))
