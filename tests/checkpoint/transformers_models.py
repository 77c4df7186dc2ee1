"""Tiny transformers models of every kind that differs in how its checkpoint becomes a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

transformers.utils.logging.disable_progress_bar()

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
_MOE: dict[str, Any] = {**_SMALL, "num_key_value_heads": 1, "moe_intermediate_size": 8}


def _model(architecture: str, config: str, **options: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        return getattr(transformers, architecture)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return build


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _model("LlamaForCausalLM", "LlamaConfig", **_SMALL),
    "llama_tied": _model("LlamaForCausalLM", "LlamaConfig", **_SMALL, tie_word_embeddings=True),
    "gpt2": _model("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "opt": _model("OPTForCausalLM", "OPTConfig", **_SMALL, ffn_dim=32, word_embed_proj_dim=16),
    "t5": _model("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2),
    "bert": _model("BertForMaskedLM", "BertConfig", **_SMALL),
    # Twelve experts: as text, "10" comes before "2".
    "mixtral": _model("MixtralForCausalLM", "MixtralConfig", **_SMALL, num_key_value_heads=1, num_local_experts=12),
    "qwen2_moe": _model(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_MOE, num_experts=4, shared_expert_intermediate_size=8
    ),
    "qwen3_moe": _model(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_MOE, num_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "deepseek_v3": _model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**_MOE, "num_key_value_heads": 2},
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]


def saved(name: str, folder: Path) -> Path:
    """The checkpoint that transformers writes of `MODELS[name]` with random weights, in several shards."""
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder, max_shard_size="20KB")
    return folder


@cache
def model_class(name: str) -> type[PreTrainedModel]:
    """The class of `MODELS[name]`."""
    with torch.device("meta"):
        return type(MODELS[name]())
