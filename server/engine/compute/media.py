"""Sequences whose prompts have images: computed one by one, with forwards that are those of transformers' `generate`.

Their keys and values are where those of other sequences are: the plan counts both alike. All other sequences are
computed by another runner, batched if that is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from bigmodel.server.engine.compute.runner import PackedRunner, Runner, input_device, readable
from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

PIXELS = "pixel_values"
"""Argument of a forward that takes images."""


def takes_images(model: torch.nn.Module) -> bool:
    """Whether the prompts of a model can have images."""
    return PIXELS in inspect.signature(model.forward).parameters


class HeldCache(DynamicCache):
    """A cache of one sequence whose keys and values are in the engine's buffers.

    It holds the states of layers with recurrent states itself, as fixed rows of one sequence.

    Args:
        kv: The sequence's buffers.
        config: Of the model: which of its layers have keys and values, and which have states.
    """

    def __init__(self, kv: SequenceKV, config: Any) -> None:
        super().__init__(config=config)
        self.offloading = True  # a dispatched model leaves it as it is: where keys and values lie is the engine's
        self._kv = kv
        self._lengths: dict[int, int] = {}
        attends = (index for index, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin))
        self._first = next(attends, 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [1, heads, tokens, dim] of layer ``layer_idx``; return those of all tokens so far."""
        start = self._lengths.get(layer_idx, 0)
        end = self._lengths[layer_idx] = start + key_states.shape[2]
        self._kv.write(layer_idx, start, key_states[0], value_states[0])
        keys, values = (each.to(key_states.device) for each in self._kv.span(layer_idx, 0, end))
        return keys[None], values[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens whose keys and values are stored: by default in the first layer that has any."""
        return self._lengths.get(layer_idx or self._first, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a forward of so many tokens attends to, and the position of the first one."""
        return self.get_seq_length(layer_idx) + query_length, 0


class _Generation:
    """The forwards that `generate` runs for one sequence: the prompt in one, then each token.

    Args:
        model: The model.
        prompt: Its tokens, with the placeholders of the images.
        media: Arguments of the forward beside them.
        cache: Empty.
    """

    def __init__(
        self,
        model: Any,
        prompt: list[int],
        media: Mapping[str, torch.Tensor],
        cache: DynamicCache,
        device: torch.device,
    ) -> None:
        self._model, self._device = model, device
        self._arguments: dict[str, Any] = {}
        self._ids = torch.tensor([prompt], device=device)
        given = {
            name: value.to(device, model.dtype if value.is_floating_point() else None) for name, value in media.items()
        }
        mask = torch.ones_like(self._ids)
        # It prepares positions, masks and features of images as each model needs them, and leaves the loop to us.
        model.generate(
            input_ids=self._ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            do_sample=False,
            max_new_tokens=1,
            custom_generate=self._take,
            **given,
        )
        self.logits = self._forward(
            model.prepare_inputs_for_generation(self._ids, is_first_iteration=True, **self._arguments)
        )

    @property
    def length(self) -> int:
        """Tokens computed so far."""
        return self._ids.shape[1]

    def step(self, token: int) -> None:
        """Compute another token."""
        self._ids = torch.cat([self._ids, torch.tensor([[token]], device=self._device)], 1)
        inputs = self._model.prepare_inputs_for_generation(self._ids, next_sequence_length=1, **self._arguments)
        self.logits = self._forward(inputs)

    def _take(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **arguments: Any,
    ) -> torch.Tensor:
        self._ids, self._arguments = input_ids, arguments
        return input_ids

    def _forward(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Logits [1, vocabulary] after the last token."""
        output = self._model(**inputs, return_dict=True)
        self._arguments = self._model._update_model_kwargs_for_generation(output, self._arguments)
        logits: torch.Tensor = output.logits[0, -1:]
        return logits.clone()  # of a prompt there may be those of all tokens


class MediaRunner:
    """Computes sequences with images itself, all others by ``inner``."""

    def __init__(self, inner: Runner, model: torch.nn.Module) -> None:
        self.inner = inner
        self.name, self.row_multiple, self.host_linear = inner.name, inner.row_multiple, inner.host_linear
        self.adapters = inner.adapters
        self.model = model
        self.device = input_device(model)

    def probe(self) -> None:
        """See :meth:`.runner.Runner.probe`."""
        self.inner.probe()

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position, by device."""
        return self.inner.bytes_per_token()

    def run(self, batch: Seq[ScheduledTokens]) -> list[torch.Tensor | None]:
        """See :meth:`.runner.Runner.run`. A prompt with images is computed in the step that reaches its end."""
        texts = [scheduled for scheduled in batch if scheduled.sequence.request.media is None]
        rows = iter(self.inner.run(texts) if texts else ())
        return [
            next(rows) if scheduled.sequence.request.media is None else self._run_one(scheduled) for scheduled in batch
        ]

    def _run_one(self, scheduled: ScheduledTokens) -> torch.Tensor | None:
        sequence = scheduled.sequence
        if not scheduled.samples:
            return None
        assert sequence.kv is not None
        assert sequence.request.media is not None
        with torch.inference_mode():
            state: _Generation | None = sequence.kv.model_cache
            sequence.kv.model_cache = None  # a forward that raises leaves it incomplete
            if state is None:
                cache = self._empty_cache(sequence.kv)
                state = _Generation(self.model, sequence.request.prompt, sequence.request.media, cache, self.device)
            for token in sequence.token_slice(state.length, len(sequence)):
                state.step(token)
            sequence.kv.model_cache = state
        return readable(state.logits)

    def _empty_cache(self, kv: SequenceKV) -> DynamicCache:
        config: Any = self.model.config
        return HeldCache(kv, config) if isinstance(self.inner, PackedRunner) else DynamicCache(config=config)
