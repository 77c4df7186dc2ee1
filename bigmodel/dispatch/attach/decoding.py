"""How `generate` of transformers runs a dispatched model: by the device it runs on, and in the chunks of its plan.

transformers selects an experts function for steps of generation by ``model.device``, which is the device of its first
weights. Those of a dispatched model may lie on the host while it runs on an accelerator; a resident model would select
another function, whose last bits differ.

A plan may count the activations of a chunk of the prompt in place of those of the whole. A chunk attends without copies
of keys and values (`attention_by_group`).
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...profile import attention_by_group
from .refusals import NotCopied

METHOD = "_optimize_model_for_decode"
"""The context that transformers runs steps of generation in."""

PREFILL = "_prefill"
"""The method by which transformers runs the prompt."""

DIVIDED = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "past_key_values", "use_cache", "logits_to_keep"}
)
"""Arguments beside token ids with which it runs a prompt in chunks: those of a text alone, with a cache."""


class DecodeAsResident(NotCopied):
    """Replaces a model's `METHOD`, such that it finds the model on `device`.

    Args:
        model: The model.
        device: Its main device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._device = device

    def __call__(self) -> AbstractContextManager[None]:
        model: Any = self._model()
        found: AbstractContextManager[None] = getattr(type(model), METHOD)(_ModelOnDevice(model, self._device))
        return found


class _ModelOnDevice:
    """A model as `METHOD` sees it: all of its attributes, but for its device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class PrefillInChunks(NotCopied):
    """Replaces a model's `PREFILL`, such that it runs a prompt in chunks where no size is asked for.

    The model's own generation config stays as it is, which is saved with the model. A prompt with images, or without a
    cache, is run whole, as it is planned: transformers refuses to divide it.

    Args:
        model: The model.
        size: Tokens of a chunk, at most.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self._model = weakref.ref(model)
        self._size = size

    def __call__(self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, **more: Any) -> Any:
        model: Any = self._model()
        given = {name for name, value in model_kwargs.items() if value is not None}
        if generation_config.prefill_chunk_size is None and "past_key_values" in given and given <= DIVIDED:
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = self._size
        in_chunks = generation_config.prefill_chunk_size is not None
        with attention_by_group(model) if in_chunks else nullcontext():
            return getattr(type(model), PREFILL)(model, input_ids, generation_config, model_kwargs, **more)
