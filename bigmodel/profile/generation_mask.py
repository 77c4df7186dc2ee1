"""What `generate` of the installed transformers does with a mask that masks nothing: versions differ."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@cache
def keeps_mask() -> bool:
    """Return whether `generate` passes such a mask on to the model, and so keeps one that grows with the text.

    It is watched doing so, on a model of a few numbers.
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
