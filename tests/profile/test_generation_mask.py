from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bigmodel.profile.generation_mask import keeps_mask


def test_other_models_get_the_mask_if_and_only_if_the_watched_one_does() -> None:
    model: Any = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8))
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert seen
    assert all((mask is not None) is keeps_mask() for mask in seen)


def test_watching_leaves_random_numbers_as_they_were() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    keeps_mask.cache_clear()
    torch.manual_seed(1)
    keeps_mask()
    assert torch.rand(1) == pytest.approx(expected)
