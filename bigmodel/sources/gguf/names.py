"""The tensors of a GGUF file under the names, and in the shapes, that transformers' checkpoints have.

A tensor keeps its bytes and its place. What differs from a checkpoint is settled in one of three ways: experts, which
are one tensor, become one entry each; a matrix of blocks, or with rows in another order, becomes a *stored weight*,
``q_proj.weight_q4_k``, that is restored where it is used; and vectors with other values are *computed* when they are
read, and cast to the dtype that the model computes in: norms that are stored plus one, biases in another order, all
that are stored in another dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from ...errors import CheckpointFormatError
from ..headers import TensorEntry
from .header import GgufTensor

NOT_IN_PLACE = -1
"""Offset of a tensor that is computed."""

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+?)(?:\.(weight|bias))?")
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules of transformers' models outside layers, by their names in files."""

IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules in a layer, by their names in files."""

_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {"gate": "block_sparse_moe.experts.{}.w1", "up": "block_sparse_moe.experts.{}.w3"}
_BY_NAME = {name: f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
UNUSED = frozenset({"rope_freqs.weight"})
"""Tensors that are part of the config."""


@dataclass(frozen=True)
class Architecture:
    """How the tensors of one of llama.cpp's architectures are called by transformers.

    Attributes:
        model_type: transformers' type of the model.
        class_name: its class with a head for language modelling.
        layer: names in a layer beside, or instead of, the usual ones.
        norms_plus_one: norms are stored plus one.
        in_pairs: rows of queries and keys have the elements that are rotated together beside each other.
        experts: name of an expert's matrix, by "gate", "up" and "down".
        interleaved: the model has the experts of a layer as one tensor, gate and up in turns; its biases too.
    """

    model_type: str
    class_name: str
    layer: Mapping[str, str] = field(default_factory=dict)
    norms_plus_one: bool = False
    in_pairs: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False


LLAMA = Architecture("llama", "LlamaForCausalLM", in_pairs=True)
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {"ffn_gate_inp": "block_sparse_moe.gate"},
    in_pairs=True,
    experts={**_MIXTRAL, "down": "block_sparse_moe.experts.{}.w2"},
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {"ffn_gate_inp": "mlp.gate"}, experts=_BY_NAME),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
        },
        experts=_BY_NAME,
        interleaved=True,
    ),
}
"""Supported architectures by ``general.architecture``; a Llama with experts is `MIXTRAL`."""


@dataclass(frozen=True)
class Named:
    """One tensor under transformers' name.

    Attributes:
        entry: its name, dtype, shape, and its place in the file: `NOT_IN_PLACE` if it is computed.
        parts: tensors of the file that it is, is part of, or is computed from.
        compute: returns it, given the parts as they are stored.
        stored: whether it is a stored weight, which is restored where it is used.
    """

    entry: TensorEntry
    parts: tuple[GgufTensor, ...]
    compute: Callable[..., torch.Tensor] | None = None
    stored: bool = False


def named_tensors(
    architecture: Architecture,
    tensors: Mapping[str, GgufTensor],
    heads: Mapping[str, int],
    dtype: torch.dtype,
    source: str,
) -> Iterator[Named]:
    """Yield the tensors of a model under transformers' names; those that have none keep theirs.

    Args:
        architecture: the model's.
        tensors: the tensors of all its files.
        heads: heads of "q_proj" and "k_proj".
        dtype: dtype that the model computes in.
        source: name of the model for messages.

    Raises:
        CheckpointFormatError: a tensor has a form that the architecture does not have.
    """
    for tensor in tensors.values():
        if tensor.name in UNUSED:
            continue
        found = _LAYER.fullmatch(tensor.name)
        if found is None:
            module, _, leaf = tensor.name.rpartition(".")
            name = f"{OUTSIDE[module]}.{leaf}" if module in OUTSIDE else tensor.name
            yield _plain(architecture, tensor, name, heads, dtype, source)
            continue
        layer, inner, leaf = f"model.layers.{int(found[1])}", str(found[2]), found[3]
        if inner.startswith("ffn_") and inner.endswith("_exps"):
            yield from _experts(architecture, tensors, tensor, (layer, inner[4:-5], leaf), dtype, source)
            continue
        known = architecture.layer.get(inner) or IN_LAYERS.get(inner)
        if known is None:
            yield _plain(architecture, tensor, tensor.name, heads, dtype, source)
            continue
        suffix = "" if leaf is None or known.endswith("sinks") else f".{leaf}"
        yield _plain(architecture, tensor, f"{layer}.{known}{suffix}", heads, dtype, source)


def _plain(
    architecture: Architecture,
    tensor: GgufTensor,
    name: str,
    heads: Mapping[str, int],
    dtype: torch.dtype,
    source: str,
) -> Named:
    """Return a tensor that is one of transformers' too."""
    module, _, leaf = name.rpartition(".")
    pairs = heads.get(module.rpartition(".")[2]) if architecture.in_pairs else None
    is_matrix = leaf == "weight" and len(tensor.shape) == 2 and ".ffn_gate_inp." not in tensor.name
    if is_matrix and (pairs is not None or tensor.type.dtype != dtype):
        return Named(_entry(tensor, f"{module}.{tensor.type.leaf}"), (tensor,), stored=True)
    if tensor.type.dtype is None:
        raise CheckpointFormatError(
            f"{source}: {tensor.name} is stored as {tensor.type.name}, and only matrices can be stored in blocks"
        )
    if leaf == "bias" and pairs is not None:
        return _computed(tensor, name, partial(halves_of_pairs, heads=pairs))
    if architecture.norms_plus_one and module.endswith("norm"):
        return _computed(tensor, name, _minus_one)
    if tensor.type.dtype != dtype:
        return _computed(tensor, name, _as_it_is)
    return Named(_entry(tensor, name), (tensor,))


def _experts(
    architecture: Architecture,
    tensors: Mapping[str, GgufTensor],
    tensor: GgufTensor,
    where: tuple[str, str, str | None],
    dtype: torch.dtype,
    source: str,
) -> Iterator[Named]:
    """Yield the experts of one tensor, or the biases of all; `where`: the layer, "gate", "up" or "down", the leaf."""
    layer, kind, leaf = where
    if leaf == "bias" and architecture.interleaved and kind in ("gate", "up"):
        other = tensors.get(tensor.name.replace("_gate_", "_up_"))
        if kind == "gate" and other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype):
            shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
            name = f"{layer}.mlp.experts.gate_up_proj_bias"
            entry = TensorEntry(name, tensor.dtype, shape, NOT_IN_PLACE, 2 * tensor.nbytes)
            yield Named(entry, (tensor, other), _in_turns)
        return
    if leaf == "bias" and architecture.interleaved:
        yield _computed(tensor, f"{layer}.mlp.experts.{kind}_proj_bias", _as_it_is)
        return
    pattern = architecture.experts.get(kind)
    if pattern is None or leaf != "weight" or len(tensor.shape) != 3:
        raise CheckpointFormatError(
            f"{source}: {tensor.name}, of the shape {tensor.shape}, is not known of {architecture.model_type} models"
        )
    stored = architecture.interleaved or tensor.type.dtype != dtype
    nbytes = tensor.nbytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        name = f"{layer}.{pattern.format(expert)}.{tensor.type.leaf if stored else 'weight'}"
        at = tensor.offset + expert * nbytes
        yield Named(TensorEntry(name, tensor.dtype, tensor.stored_shape[1:], at, nbytes), (tensor,), stored=stored)


def _entry(tensor: GgufTensor, name: str) -> TensorEntry:
    return TensorEntry(name, tensor.dtype, tensor.stored_shape, tensor.offset, tensor.nbytes)


def _computed(tensor: GgufTensor, name: str, compute: Callable[..., torch.Tensor]) -> Named:
    assert prod(tensor.stored_shape) * tensor.dtype.itemsize == tensor.nbytes
    return Named(TensorEntry(name, tensor.dtype, tensor.shape, NOT_IN_PLACE, tensor.nbytes), (tensor,), compute)


def halves_of_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in transformers' order, the two halves of a head, from llama.cpp's, pairs of both.

    Raises:
        CheckpointFormatError: the rows are not an even number for each head.
    """
    if rows.shape[0] % (2 * heads):
        raise CheckpointFormatError(f"{rows.shape[0]} rows are no even number for each of {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _minus_one(norm: torch.Tensor) -> torch.Tensor:
    return norm - 1


def _in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2)
