"""Tiny mixtures of experts with random weights, in eval mode, each with a dense path beside its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LAYERS = 2

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """8 experts, 2 for each token, in each of 2 layers; an expert has 3 * 32 * 64 elements."""
    torch.manual_seed(0)
    sizes = {**_SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, **changes}
    return MixtralForCausalLM(MixtralConfig(**sizes)).eval()


def qwen2_moe() -> Qwen2MoeForCausalLM:
    """8 experts, 2 for each token, beside a shared one."""
    torch.manual_seed(0)
    sizes = {**_SMALL, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2)).eval()


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """8 experts, 3 for each token."""
    torch.manual_seed(0)
    sizes = {**_SMALL, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=3)).eval()


def deepseek_v3() -> DeepseekV3ForCausalLM:
    """8 experts in 2 groups of which one is chosen, 2 for each token, beside a shared one; the first layer is dense."""
    torch.manual_seed(0)
    sizes = {**_SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **groups)).eval()


MIXTURES: list[Callable[[], nn.Module]] = [mixtral, qwen2_moe, qwen3_moe, deepseek_v3]

EXPERT_BYTES = 3 * 32 * 64 * 4
"""Bytes of one expert of `mixtral`."""


def tokens(count: int = 6) -> torch.Tensor:
    """Return token ids (1, count)."""
    return (torch.arange(count) * 7 % 64).view(1, count)


def experts_of(model: nn.Module, layer: int) -> Any:
    """Return the experts module of a layer."""
    return model.model.layers[layer].mlp.experts  # type: ignore[union-attr,index]


def chosen_by(model: nn.Module, *inputs: torch.Tensor) -> list[set[int]]:
    """Run a resident model, and return which experts each of its mixtures chose, call by call."""
    chosen: list[set[int]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: chosen.append(set(args[1].reshape(-1).tolist())))
        for module in model.modules()
        if hasattr(module, "is_transposed")
    ]
    try:
        with torch.no_grad():
            for tensor in inputs:
                model(tensor)
    finally:
        for hook in hooks:
            hook.remove()
    return chosen
