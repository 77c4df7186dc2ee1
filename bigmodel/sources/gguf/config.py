"""transformers' config of a model, from the metadata and the tensors of its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CheckpointFormatError
from .header import GgufTensor
from .names import ARCHITECTURES, MIXTRAL, Architecture

_LARGEST = 2**31 - 1
_MOST_LAYERS = 2**12
_MISSING = object()
Read = Callable[[GgufTensor], torch.Tensor]
"""Returns a small tensor of the file."""


class Metadata:
    """The metadata of one architecture, each value checked when it is asked for.

    Args:
        values: the metadata of the file.
        source: name of the model for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: Any = _MISSING) -> str:
        """Return a string by its whole key."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "text")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """Return a positive integer of the architecture."""
        value = self.values.get(f"{self.architecture}.{name}", default)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise self.refusal(f"{self.architecture}.{name}", value, f"an integer from 1 to {_LARGEST}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Return a positive finite number of the architecture."""
        value = self.values.get(f"{self.architecture}.{name}", default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refusal(f"{self.architecture}.{name}", value, "a positive number")
        return float(value)

    def has(self, name: str) -> bool:
        """Whether the metadata has a value of the architecture."""
        return f"{self.architecture}.{name}" in self.values

    def token(self, name: str) -> int | None:
        """Return the number of a special token, such as "eos"; None if there is none."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value <= _LARGEST else None

    def refusal(self, key: str, value: object, wanted: str) -> CheckpointFormatError:
        """Return the error about a value that is not what it must be."""
        shown = "missing" if value is _MISSING else f"{value!r:.60}"
        return CheckpointFormatError(f"{self.source}: its metadata {key} is {shown}, not {wanted}")


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a model.

    Raises:
        CheckpointFormatError: it is not supported.
    """
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise CheckpointFormatError(
            f"{metadata.source}: the architecture {metadata.architecture!r:.60} is not supported in GGUF files; "
            f"{', '.join(ARCHITECTURES)} are. Use the model's safetensors checkpoint"
        )
    return MIXTRAL if metadata.architecture == "llama" and metadata.has("expert_count") else found


def heads_of(metadata: Metadata) -> dict[str, int]:
    """Return the number of heads of queries and keys, by module."""
    heads = metadata.count("attention.head_count")
    return {"q_proj": heads, "k_proj": metadata.count("attention.head_count_kv", heads)}


def config_of(
    metadata: Metadata, architecture: Architecture, tensors: Mapping[str, GgufTensor], read: Read
) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a model, without what is quantised.

    Raises:
        CheckpointFormatError: a value is missing, out of range, or contradicts the tensors.
    """
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointFormatError(f"{metadata.source}: has no matrix token_embd.weight")
    hidden, heads = metadata.count("embedding_length"), heads_of(metadata)
    layers = metadata.count("block_count")
    if layers > _MOST_LAYERS or f"blk.{layers - 1}.attn_norm.weight" not in tensors:
        raise metadata.refusal(f"{metadata.architecture}.block_count", layers, "the number of its layers")
    if embedding.shape[1] != hidden:
        raise metadata.refusal(f"{metadata.architecture}.embedding_length", hidden, f"{embedding.shape[1]}")
    width = metadata.count("rope.dimension_count", max(1, hidden // heads["q_proj"]))
    common = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "dtype": str(dtype_of(tensors)).removeprefix("torch."),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads["q_proj"],
        "num_key_value_heads": heads["k_proj"],
        "head_dim": metadata.count("attention.key_length", width),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(metadata, tensors, read),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }
    return common | _SPECIFIC[architecture.model_type](metadata, tensors, common)


def dtype_of(tensors: Mapping[str, GgufTensor]) -> torch.dtype:
    """Return the dtype to compute in: that of matrices in half precision; bfloat16 if they are in blocks."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16


def _rope(metadata: Metadata, tensors: Mapping[str, GgufTensor], read: Read) -> dict[str, Any]:
    """Return how positions are encoded."""
    theta = {"rope_theta": metadata.number("rope.freq_base", 10000.0)}
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        return {**theta, **_llama3(metadata, read(factors), theta["rope_theta"])}
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {**theta, "rope_type": "default"}
    if kind == "linear":
        return {**theta, "rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind != "yarn":
        raise metadata.refusal(f"{metadata.architecture}.rope.scaling.type", kind, "none, linear or yarn")
    found = {
        **theta,
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    return found | {"truncate": False} if metadata.architecture == "gpt-oss" else found


def _llama3(metadata: Metadata, factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Return the scaling of Llama 3, of which a file has the factor of each frequency only.

    Raises:
        CheckpointFormatError: the factors are those of another scaling.
    """
    given = factors.flatten().double()
    largest, low, high, original = float(given.max()), 1.0, 4.0, 8192
    lengths = 2 * math.pi * theta ** (torch.arange(given.numel(), dtype=torch.float64) / given.numel())
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / largest + smooth)
    expected = torch.where(lengths < original / high, 1.0, torch.where(lengths > original / low, largest, between))
    if not torch.allclose(given, expected, rtol=1e-3):
        raise CheckpointFormatError(
            f"{metadata.source}: rope_freqs.weight is not of Llama 3's scaling of positions, the only one supported; "
            "use the model's safetensors checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.count("feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _mixtral(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_local_experts": _experts(metadata, tensors),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }


def _qwen(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": metadata.count("feed_forward_length"), "use_sliding_window": False}


def _qwen3_moe(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    width = metadata.count("expert_feed_forward_length")
    return {
        "intermediate_size": metadata.count("feed_forward_length", width),
        "moe_intermediate_size": width,
        "num_experts": _experts(metadata, tensors),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _gemma2(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.count("feed_forward_length"),
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scalar(common, layers_of_largest=46),
    }


def _gemma3(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    full = common["rope_parameters"] | {
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
    }
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    return {
        "intermediate_size": metadata.count("feed_forward_length"),
        "sliding_window": metadata.count("attention.sliding_window"),
        "query_pre_attn_scalar": _scalar(common, layers_of_largest=62),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _scalar(common: Mapping[str, Any], layers_of_largest: int) -> int:
    """Return what attention scores of a Gemma are divided by the root of; as llama.cpp, by the number of layers."""
    largest = common["num_hidden_layers"] == layers_of_largest
    found = common["hidden_size"] // common["num_attention_heads"] if largest else common["head_dim"]
    assert isinstance(found, int)
    return found


def _gpt_oss(metadata: Metadata, tensors: Mapping[str, GgufTensor], common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_local_experts": _experts(metadata, tensors),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": metadata.count("attention.sliding_window"),
    }


def _experts(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    count = metadata.count("expert_count")
    first = tensors.get("blk.0.ffn_down_exps.weight")
    if first is None or len(first.shape) != 3 or first.shape[0] != count:
        raise metadata.refusal(f"{metadata.architecture}.expert_count", count, "the number of its experts")
    return count


_SPECIFIC: dict[str, Callable[[Metadata, Mapping[str, GgufTensor], Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}
"""Returns what is particular to the config of each of transformers' types."""
