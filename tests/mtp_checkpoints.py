"""Tiny checkpoints with an MTP head under the names that they are published with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.server.tiny import tiny_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": len(tiny_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
}

GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}

QWEN_NEXT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "glm4_moe": ("Glm4Moe", GLM),
    "qwen3_next": ("Qwen3Next", QWEN_NEXT),
}


def build(kind: str, **changes: Any) -> Any:
    """A random model of this kind."""
    torch.manual_seed(0)
    prefix, settings = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **settings, **changes})
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def save_with_head(folder: Path, kind: str = "deepseek_v3", **changes: Any) -> Any:
    """Save a random model with a random head; return the model."""
    model = build(kind, **changes)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    add_head(folder, head_tensors(kind, model, folder.parent / "one-layer", **changes))
    return model


def head_tensors(kind: str, model: Any, scratch: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The tensors of a random head, under published names: those of a layer are as transformers saves them."""
    dense = changes.get("first_k_dense_replace", 1) > model.config.num_hidden_layers
    one: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": int(dense)}
    if kind == "qwen3_next":
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layer = build(kind, **{**changes, **one})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5)
    layer.save_pretrained(scratch)
    saved = load_file(scratch / "model.safetensors")
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    draw = torch.Generator().manual_seed(2)
    norms = {name: torch.rand(width, generator=draw) + 0.5 for name in ("embedding", "hidden", "end")}
    projection = torch.randn(width, 2 * width, generator=draw) / width**0.5
    inner = {name: tensor for name, tensor in saved.items() if name.startswith("model.layers.0.")}
    if kind == "qwen3_next":
        return {
            **{"mtp." + name.removeprefix("model."): tensor for name, tensor in inner.items()},
            "mtp.fc.weight": projection,
            "mtp.pre_fc_norm_embedding.weight": norms["embedding"],
            "mtp.pre_fc_norm_hidden.weight": norms["hidden"],
            "mtp.norm.weight": norms["end"],
        }
    stem = f"model.layers.{layers}."
    return {
        **{stem + name.removeprefix("model.layers.0."): tensor for name, tensor in inner.items()},
        f"{stem}eh_proj.weight": projection,
        f"{stem}enorm.weight": norms["embedding"],
        f"{stem}hnorm.weight": norms["hidden"],
        f"{stem}shared_head.norm.weight": norms["end"],
        f"{stem}shared_head.head.weight": model.lm_head.weight.detach().clone(),
        f"{stem}embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
    }


def add_head(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add a file of tensors to a checkpoint of one file, and an index."""
    whole, head = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    saved = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(saved, folder / whole, metadata={"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / head, metadata={"format": "pt"})
    names = dict.fromkeys(saved, whole) | dict.fromkeys(tensors, head)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
