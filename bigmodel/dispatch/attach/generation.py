"""`generate` as one call of a dispatched model: its keys and values are there between its forwards, too.

A generation counts as one planned forward if it is known to keep to the planned rows and tokens; any other is admitted
alone (`..streaming.admission`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...plan import Plan
from .attached_forward import AttachedForward

METHOD = "generate"

INPUTS = ("inputs", "input_ids", "inputs_embeds")
"""Arguments of which the largest is the prompt: embeddings are given beside ids of no tokens."""

BEYOND = ("assistant_model", "prompt_lookup_num_tokens", "guidance_scale", "custom_generate", "past_key_values")
"""Arguments with which a generation has further forwards or other keys and values than those of its prompt."""

CONTINUOUS = "paged"
"""The cache by which transformers chooses continuous batches."""

ROWS = ("num_beams", "num_return_sequences")
"""Arguments that have each row of the prompt generated several times."""


class Generation(AttachedForward):
    """The attachment of a model's `generate`, which moves nothing.

    Args:
        model: The model.
        plan: Its plan.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model, None, None, METHOD)
        self._rows, self._tokens = plan.batch_size, plan.context_length

    def forwards_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> int:
        """Return the number of planned forwards that a generation counts as; it records no gradients in any mode.

        One in continuous batches waits for forwards in a thread of their own: these are admitted instead.
        """
        if kwargs.get("cache_implementation") == CONTINUOUS:
            return 0
        return 1 if most == 1 or self._is_planned(args, kwargs) else most

    def _is_planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        given = [*args[:1], *map(kwargs.get, INPUTS)]
        shapes = [each.shape for each in given if isinstance(each, torch.Tensor) and each.dim() >= 2]
        if len(args) > 1 or not shapes:
            return False
        config = kwargs.get("generation_config") or getattr(self.module, "generation_config", None)

        def asked(name: str) -> Any:
            return kwargs[name] if kwargs.get(name) is not None else getattr(config, name, None)

        if any(asked(name) is not None for name in BEYOND):
            return False
        rows = max(shape[0] for shape in shapes) * max([1, *(asked(name) or 1 for name in ROWS)])
        prompt = max(shape[1] for shape in shapes)
        new = asked("max_new_tokens")
        tokens = prompt + new if new is not None else asked("max_length")
        return tokens is not None and rows <= self._rows and max(tokens, prompt) <= self._tokens
