from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bigmodel.nodes.caches import NumberedCaches


def model() -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))


def test_a_cache_that_was_cut_is_cut_on_the_other_stages() -> None:
    lead, follower, stage = NumberedCaches(), NumberedCaches(), model()
    cache = DynamicCache(config=stage.config)
    ids = torch.tensor([[1, 2, 3, 4]])
    for kept in (0, 4, 5, 3):
        if cache.get_seq_length() > kept:
            cache.crop(kept - cache.get_seq_length())
        with follower.follow(lead.tell(cache), stage) as arguments:
            assert arguments["past_key_values"].get_seq_length() == kept
            stage(ids[:, : 4 if not kept else 1], **arguments)
        stage(ids[:, : 4 if not kept else 1], past_key_values=cache)


def test_caches_are_numbered_and_dropped_with_their_owner() -> None:
    lead, follower, stage = NumberedCaches(), NumberedCaches(), model()
    caches = [DynamicCache(config=stage.config) for _ in range(2)]
    told = [lead.tell(cache) for cache in (*caches, caches[0])]
    assert [each["cache"] for each in told] == [1, 2, 1]
    for values in told:
        with follower.follow(values, stage):
            pass
    assert set(follower.kept) == {1, 2}
    del caches[1]
    values = lead.tell(None)
    assert values == {"cache": None, "dropped": [2]}
    with follower.follow(values, stage) as arguments:
        assert arguments == {"use_cache": False}
    assert set(follower.kept) == {1}
