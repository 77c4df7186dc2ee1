"""Tiny checkpoints of real architectures, published in each format, each beside the model that it stands for.

Weights are random codes and scales. The model beside it is transformers' own, loaded from a checkpoint of the restored
weights; that each format restores them rightly is tested on its own.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bigmodel.quantized.recognise import read_scheme
from bigmodel.sources.headers import TensorEntry

from .twins import Tensors, Twin

LAYERS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
TOKENS = (torch.arange(12) * 7 % 64).view(2, 6)
_WHOLE = {"embed_tokens", "lm_head", "gate", "router"}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def qwen3(**changes: Any) -> PreTrainedModel:
    """Queries and keys are normalised, and the head is tied to the embedding."""
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": True, **changes}))


def mixtral(**changes: Any) -> PreTrainedModel:
    """8 experts, 2 for each token, whose checkpoint has other names than the model."""
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, **changes}))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    """8 experts, 3 for each token."""
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, **changes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    """8 experts in 2 groups beside a shared one, after a dense layer; low-rank attention of odd sizes."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32}
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    more = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **heads, **groups, **more, **changes}))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    """4 experts, 2 for each token, with biases; matrices are transposed."""
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * LAYERS}
    return GptOssForCausalLM(GptOssConfig(**{**sizes, **changes}))


def published(
    folder: Path, twin: Twin, make: Callable[..., PreTrainedModel] = llama, **changes: Any
) -> PreTrainedModel:
    """Write the checkpoint of a model whose linear layers and experts are stored as `twin` does; return the model that
    it stands for, in bfloat16."""
    files, whole = _published(twin, make, tuple(changes.items()))
    for name, content in files.items():
        file = folder.parent / name.format(folder.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return copy.deepcopy(whole)


@lru_cache(maxsize=8)
def _published(
    twin: Twin, make: Callable[..., PreTrainedModel], changes: tuple[tuple[str, Any], ...]
) -> tuple[dict[str, bytes], PreTrainedModel]:
    """Return the contents of the files of `published`, by path with {} for the folder's name, and the model."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder)
        make(**dict(changes)).to(torch.bfloat16).save_pretrained(whole)
        tensors = load_file(whole / "model.safetensors")
        stored: Tensors = {}
        for key, weight in tensors.items():
            if is_quantised(key, weight):
                found, restored = _stored(twin, key, weight)
                stored |= found
                tensors[key] = restored.to(torch.bfloat16)
            else:
                stored[key] = weight
        save_file(tensors, whole / "model.safetensors", {"format": "pt"})
        config = json.loads((whole / "config.json").read_text())
        files = {f"{{}}-whole/{file.name}": file.read_bytes() for file in whole.iterdir()}
        files["{}/model.safetensors"] = save(stored, {"format": "pt"})
        files["{}/config.json"] = json.dumps({**config, "quantization_config": twin.config}).encode()
        return files, AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).eval()


def is_quantised(key: str, weight: torch.Tensor) -> bool:
    """Whether published checkpoints quantise such a weight: a matrix that is no embedding, head or router."""
    fused = key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return fused or (weight.dim() == 2 and key.endswith(".weight") and _WHOLE.isdisjoint(key.split(".")))


def restore(twin: Twin, tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
    """Return the weight that the format of `twin` restores, in bfloat16."""
    scheme = read_scheme({"quantization_config": twin.config})
    assert scheme is not None
    entries = {leaf: TensorEntry(leaf, t.dtype, tuple(t.shape), 0, t.nbytes) for leaf, t in tensors.items()}
    format = scheme.format_of("", entries, lambda entry: tensors[entry.name])
    return format.restore(tensors, shape, torch.bfloat16)


def _stored(twin: Twin, key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return random stored tensors by key, and the weight that they stand for."""
    if weight.dim() == 2:
        shape = (weight.shape[0], weight.shape[1])
        tensors = twin.make(shape)
        base = key.removesuffix("weight")
        return {base + leaf: tensor for leaf, tensor in tensors.items()}, restore(twin, tensors, shape)
    shape = (weight.shape[2], weight.shape[1])
    experts = [twin.make(shape) for _ in weight]
    stacked = {key + leaf.removeprefix("weight"): torch.stack([e[leaf] for e in experts]) for leaf in experts[0]}
    return stacked, torch.stack([restore(twin, tensors, shape).T for tensors in experts]).contiguous()
