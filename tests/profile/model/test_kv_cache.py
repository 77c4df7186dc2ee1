from __future__ import annotations

import pytest
import transformers as t
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.profile import kv_cache_bytes, layer_cache_bytes, profile_model

from ...examples import alike
from ..models import on_meta

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 100, "num_hidden_layers": 3,
}  # fmt: skip

CONFIGS = {
    "llama": lambda: t.LlamaConfig(**SMALL),
    "gpt2": lambda: t.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=100),
    "qwen3": lambda: t.Qwen3Config(**SMALL, head_dim=16),
    "deepseek": lambda: t.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 8, "num_hidden_layers": 4}, moe_intermediate_size=32,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
    ),
    "mixtral": lambda: t.MixtralConfig(**SMALL, sliding_window=16),
    "gemma3": lambda: t.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 7}, sliding_window=16, head_dim=16),
}  # fmt: skip


def model(name: str) -> nn.Module:
    config = CONFIGS[name]()
    return on_meta(t.AutoModelForCausalLM.from_config, config)


@pytest.mark.slow
@alike(
    ("name", "cache"),
    [("llama", "static"), *((name, "dynamic") for name in CONFIGS), ("gemma3", "static"), ("deepseek", "static")],
    first=5,
)
def test_the_formula_agrees_with_the_models_own_cache(name: str, cache: str) -> None:
    found = model(name)
    profile = profile_model(found, batch_size=2, context_length=64, new_tokens=1, cache=cache)
    kept = sum(profile.kv_cache)
    if name == "deepseek":
        # Whether latent attention is expanded before it is cached differs between versions of transformers.
        assert kept in {kv_cache_bytes(found.config, 2, 64, "float32", c) for c in ("dynamic", "expanded")}
    else:
        assert kept == kv_cache_bytes(found.config, 2, 64, "float32", cache)


def test_a_known_size() -> None:
    config = t.LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    assert kv_cache_bytes(config, 1, 1, "bfloat16") == 2 * 32 * 8 * 128 * 2


def test_a_sliding_window_bounds_its_layers_only() -> None:
    sizes = layer_cache_bytes(CONFIGS["gemma3"](), 1, 1000, "float16")
    assert sizes[0] * 1000 == sizes[5] * 16


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(PlanError, match="paged"):
        kv_cache_bytes(CONFIGS["llama"](), 1, 1, "float16", cache="paged")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("config", None),
        ("config", {}),
        ("batch_size", -1),
        ("batch_size", 1.5),
        ("context_length", None),
        ("cache", []),
    ],
)
def test_an_invalid_argument_is_named(argument: str, value: object) -> None:
    given = {"config": t.LlamaConfig(), "batch_size": 1, "context_length": 16, "dtype": "float32", argument: value}
    with pytest.raises(PlanError, match=argument):
        kv_cache_bytes(**given)  # type: ignore[arg-type]
