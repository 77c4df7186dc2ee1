"""The calls that a model gets when it is used: what prefill and decode are for each family of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .recorder import Recorder
from .workload import Workload


class Session:
    """A model being used, its forwards recorded as phases.

    Attributes:
        marks: (name, (first event, end), tokens of each sequence) of every phase so far.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, workload: Workload, device: torch.device) -> None:
        self.model = model
        self.workload = workload
        self.marks: list[tuple[str, tuple[int, int], int]] = []
        self._recorder = recorder
        self._device = device
        self._accepted = set(inspect.signature(model.forward).parameters)

    def phase(self, name: str, tokens: int, run: Callable[[], Any]) -> Any:
        """Run something as a phase of the recording and return what it returns."""
        first = len(self._recorder.events)
        result = run()
        self.marks.append((name, (first, len(self._recorder.events)), tokens))
        return result

    def call(self, **inputs: Any) -> Any:
        """Call the model with those of `inputs` that its forward takes."""
        return self.model(**{name: value for name, value in inputs.items() if name in self._accepted})

    def tokens(self, length: int) -> torch.Tensor:
        """Return fake token ids: int64, (batch, length)."""
        return torch.zeros(self.workload.batch_size, length, dtype=torch.long, device=self._device)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return a fake sample of every sequence of the batch, in the model's dtype: (batch, *shape)."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return torch.zeros(self.workload.batch_size, *shape, dtype=dtype, device=self._device)

    def fake(self, value: Any) -> Any:
        """Return `value` with every tensor in it replaced by a fake one of its shape and dtype."""

        def one(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            return torch.zeros(item.shape, dtype=item.dtype, device=self._device)

        return tree_map(one, value)


class ConstantsThroughHost(TorchFunctionMode):
    """Lets `torch.tensor(data, device=...)` look at its data on the CPU: elsewhere it would make a real tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        constant = func(*args, **{**kwargs, "device": "cpu"})
        return torch.empty(constant.shape, dtype=constant.dtype, device=device)


def use_example(session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record one forward on arguments like the given ones."""
    args, kwargs = session.fake(tuple(args)), session.fake(dict(kwargs))

    def run() -> None:
        session.model(*args, **kwargs)

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


def _use_text(session: Session, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        _transduce(session, {"input_ids": session.tokens(max(session.workload.prompt_length, 1))})
    elif "past_key_values" in inspect.signature(session.model.forward).parameters and session.workload.cache:
        _generate(session, config)
    else:
        _forward(session, session.workload.context_length, input_ids=session.tokens(session.workload.context_length))


def _forward(session: Session, tokens: int, **inputs: torch.Tensor) -> None:
    """One forward whose output is dropped at once."""

    def run() -> None:
        session.call(**inputs)

    session.phase("forward", tokens, run)


def _use_image(session: Session, config: Any) -> None:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    pixels = session.zeros(getattr(vision, "num_channels", 3), height, width)
    _forward(session, 1, pixel_values=pixels)


def _use_audio(session: Session, config: Any) -> None:
    frames = 2 * getattr(config, "max_source_positions", 1500)
    features = session.zeros(getattr(config, "num_mel_bins", 80), frames)
    _transduce(session, {"input_features": features})


def _generate(session: Session, config: Any) -> None:
    """Prefill of the prompt, then the last step of generation, with a cache that has grown to all but one token."""
    work = session.workload
    ids, _mask = session.tokens(max(work.prompt_length, 1)), session.tokens(max(work.prompt_length, 1))
    keep: dict[str, Any] = {} if work.all_logits else {"logits_to_keep": 1}
    cache = _new_cache(work, config)

    def step(tokens: torch.Tensor) -> Any:
        output = session.call(input_ids=tokens, past_key_values=cache, use_cache=True, **keep)
        _sample(output)
        return output.past_key_values

    cache = session.phase("prefill", ids.shape[1], lambda: step(ids))
    if work.new_tokens and work.prompt_length:
        if work.new_tokens > 1:
            cache = step(session.tokens(work.new_tokens - 1))
        last = session.tokens(1)
        session.phase("decode", 1, lambda: step(last))


def _transduce(session: Session, source: dict[str, torch.Tensor]) -> None:
    """Encode, and the first step of decoding; then the last step."""
    work = session.workload
    first, last = session.tokens(1), session.tokens(1)

    def begin() -> Any:
        output = session.call(**source, decoder_input_ids=first, use_cache=True)
        _sample(output)
        return output.past_key_values, output.encoder_last_hidden_state

    def step(tokens: torch.Tensor, cache: Any, encoded: torch.Tensor) -> Any:
        output = session.call(
            encoder_outputs=(encoded,), decoder_input_ids=tokens, past_key_values=cache, use_cache=True
        )
        _sample(output)
        return output.past_key_values

    cache, encoded = session.phase("prefill", max(work.prompt_length, 1), begin)
    if work.new_tokens > 1:
        if work.new_tokens > 2:
            cache = step(session.tokens(work.new_tokens - 2), cache, encoded)
        session.phase("decode", 1, lambda: step(last, cache, encoded))


def _sample(output: Any) -> None:
    """What choosing the next token takes: the last logits in float32, and their maximum."""
    logits = getattr(output, "logits", None)
    if logits is not None and logits.dim() == 3:
        logits[:, -1, :].to(dtype=torch.float32, copy=True).argmax(-1)


def _new_cache(work: Workload, config: Any) -> Any:
    """Return the cache the workload asks for; None lets the model make its own, dynamic one."""
    if work.cache != "static":
        return None
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=work.context_length)
