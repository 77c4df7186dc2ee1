"""GGUF files of tiny models of real architectures, each beside the model of transformers that it stands for.

Files are written from the format's description. Blocks are random codes and scales; the model beside a file has the
values that they stand for, in transformers' order and names, which this module knows on its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bigmodel.quantized.formats.gguf import Gguf
from bigmodel.sources.gguf.types import TYPES

from .checkpoints import SIZES, gpt_oss, llama, mixtral, qwen3, qwen3_moe

NUMBERS = {kind.name: (number, kind) for number, kind in TYPES.items()}
_SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
"""Places of float16 scales in a block."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it: its type, shape in elements, and bytes."""

    kind: str
    shape: tuple[int, ...]
    raw: bytes


def random_blocks(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random blocks of a type, uint8 (..., bytes of a row), whose scales are small."""
    _, found = NUMBERS[kind]
    count = torch.Size(shape).numel() // found.elements
    blocks = torch.randint(0, 256, (count, found.nbytes), dtype=torch.uint8)
    largest = {"Q4_K": 0.0003, "Q5_K": 0.0003, "Q6_K": 0.0001, "Q8_0": 0.001}.get(kind, 0.01)
    for place in _SCALES.get(kind, ()):
        scale = (torch.rand(count, 1) * largest + largest / 4).half()
        blocks[:, place : place + 2] = scale.view(torch.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = torch.randint(118, 122, (count,))
    return blocks.view(*shape[:-1], -1)


def values(kind: str, raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of blocks in the order of the file, float32."""
    rows = (torch.Size(shape).numel() // shape[-1], shape[-1])
    _, found = NUMBERS[kind]
    return Gguf(found).restore({found.leaf: raw.view(rows[0], -1)}, rows, torch.float32).view(shape)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = 32) -> None:
    """Write a GGUF file of version 3. Metadata: int (u32), float (f32), bool, str, or lists of one of them."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_string(key) + _typed(value) for key, value in metadata.items()]
    body, at = [], 0
    for name, tensor in tensors.items():
        sizes = tuple(reversed(tensor.shape))
        number = NUMBERS[tensor.kind][0]
        head.append(_string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, at))
        padded = tensor.raw + bytes(-len(tensor.raw) % alignment)
        body.append(padded)
        at += len(padded)
    written = b"".join(head)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written + bytes(-len(written) % alignment) + b"".join(body))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind, _ = _plain(value[0])
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_plain(each)[1] for each in value)
    kind, content = _plain(value)
    return struct.pack("<I", kind) + content


def _plain(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (8, _string(value))


@dataclass(frozen=True)
class Family:
    """An architecture: how to make a tiny model of it, and what llama.cpp calls it and its parts."""

    name: str
    make: Callable[..., PreTrainedModel]
    metadata: Mapping[str, Any]
    changes: Mapping[str, Any]
    parts: Mapping[str, str]
    plus_one: bool = False


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_GEMMA_PARTS = {
    **_PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS_PARTS = {
    **_PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
}
_MOE_PARTS = {**_PARTS, "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes}))


def gemma2(**changes: Any) -> PreTrainedModel:
    sizes = {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 4, **changes}
    return Gemma2ForCausalLM(Gemma2Config(**sizes))


def gemma3(**changes: Any) -> PreTrainedModel:
    sizes = {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 4, **changes}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes))


_EXPERTS = {"expert_count": 8, "expert_used_count": 2}
LLAMA = Family("llama", llama, {"rope.dimension_count": 16}, {}, _PARTS)
QWEN3 = Family("qwen3", qwen3, {"attention.key_length": 16}, {}, _PARTS)
MIXTRAL = Family("llama", mixtral, {"rope.dimension_count": 16, **_EXPERTS}, {}, _MOE_PARTS)
QWEN3_MOE = Family(
    "qwen3moe",
    qwen3_moe,
    {"attention.key_length": 16, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
    {"norm_topk_prob": True},
    _MOE_PARTS,
)
GPT_OSS = Family(
    "gpt-oss",
    gpt_oss,
    {
        "attention.key_length": 16,
        "attention.sliding_window": 4,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
    {"sliding_window": 4, "layer_types": None},
    _GPT_OSS_PARTS,
)
GEMMA2 = Family(
    "gemma2",
    gemma2,
    {"attention.key_length": 16, "attention.sliding_window": 4, "attn_logit_softcapping": 50.0},
    {},
    _GEMMA_PARTS,
    plus_one=True,
)
GEMMA3 = Family(
    "gemma3",
    gemma3,
    {"attention.key_length": 16, "attention.sliding_window": 4, "rope.freq_base": 1000000.0},
    {},
    _GEMMA_PARTS,
    plus_one=True,
)
QWEN2 = Family("qwen2", qwen2, {}, {}, _PARTS)
FAMILIES = [LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, GPT_OSS, GEMMA2, GEMMA3]


def gguf_file(
    path: Path,
    family: Family,
    kind: str = "Q4_0",
    files: int = 1,
    metadata: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Write the GGUF file of a random model whose matrices are of the type `kind`; return the model that it stands for.

    Args:
        path: the file; of a split model its name without number.
        family: the architecture.
        kind: type of matrices in the layers, and of the embedding.
        files: number of files that it is split into.
        metadata: further metadata, with whole keys.
        changes: of the config.
    """
    torch.manual_seed(0)
    whole = path.parent / f"{path.stem}-whole"
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    model = family.make(**{**family.changes, **changes}).to(dtype)
    model.save_pretrained(whole)
    given = load_file(whole / "model.safetensors")
    writer = _Writer(family, kind, model.config)
    tensors = writer.tensors(given)
    save_file(
        {name: value.to(dtype).contiguous() for name, value in given.items()},
        whole / "model.safetensors",
        {"format": "pt"},
    )
    items = _metadata(family, model.config) | dict(metadata or {})
    if files == 1:
        write_gguf(path, items, tensors)
    names = list(tensors)
    for number in range(files if files > 1 else 0):
        own = {name: tensors[name] for name in names[number::files]}
        split = {"split.no": number, "split.count": files, "split.tensors.count": len(names)}
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{files:05}.gguf")
        write_gguf(part, {**items, **split} if number == 0 else split, own)
    return AutoModelForCausalLM.from_pretrained(whole, dtype=dtype).eval()


def _metadata(family: Family, config: Any) -> dict[str, Any]:
    common = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    theta = config.rope_parameters.get("rope_theta")
    if theta is not None:
        common["rope.freq_base"] = float(theta)
    own = {f"{family.name}.{key}": value for key, value in {**common, **family.metadata}.items()}
    return {"general.architecture": family.name, **own}


class _Writer:
    """Turns the tensors of a checkpoint of transformers into those of a GGUF file.

    Each tensor given is replaced by the value that the file has for it.
    """

    def __init__(self, family: Family, kind: str, config: Any) -> None:
        self._family, self._kind, self._config = family, kind, config

    def tensors(self, given: dict[str, torch.Tensor]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        experts: dict[str, dict[int, str]] = {}
        for name in list(given):
            if ".experts." in name:
                self._sort_expert(name, experts, found, given)
                continue
            gguf = self._name(name)
            found[gguf], given[name] = self._stored(gguf, given[name])
        for gguf, names in experts.items():
            stacked = torch.stack([given[names[number]] for number in sorted(names)])
            found[gguf], restored = self._stored(gguf, stacked)
            for number, name in names.items():
                given[name] = restored[number]
        return found

    def _sort_expert(
        self, name: str, experts: dict[str, dict[int, str]], found: dict[str, Stored], given: dict[str, torch.Tensor]
    ) -> None:
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        rest = inner.partition(".experts.")[2]
        if rest[0].isdigit():  # one by one
            number, _, leaf = rest.partition(".")
            kind = {"w1": "gate", "w2": "down", "w3": "up"}.get(leaf.split(".")[0], leaf.split("_")[0])
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", {})[int(number)] = name
            return
        value = given[name]
        leaf = "bias" if rest.endswith("bias") else "weight"
        if leaf == "weight":
            value = value.transpose(1, 2)  # (experts, out, in)
        if rest.startswith("down"):
            found[f"blk.{layer}.ffn_down_exps.{leaf}"], restored = self._stored(f"ffn_down_exps.{leaf}", value)
        else:
            restored = torch.empty_like(value, dtype=torch.float32)
            for place, kind in enumerate(("gate", "up")):
                gguf = f"blk.{layer}.ffn_{kind}_exps.{leaf}"
                found[gguf], restored[:, place::2] = self._stored(gguf, value[:, place::2])
        given[name] = restored.transpose(1, 2) if leaf == "weight" else restored

    def _name(self, name: str) -> str:
        outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        outside |= {"lm_head.weight": "output.weight"}
        if name in outside:
            return outside[name]
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if inner in self._family.parts:
            return f"blk.{layer}.{self._family.parts[inner]}.weight"
        module, _, leaf = inner.rpartition(".")
        return f"blk.{layer}.{self._family.parts[module]}.{leaf}"

    def _stored(self, gguf: str, value: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        """Return a tensor as the file has it, and its value in transformers' order."""
        value = value.float()
        heads = None
        if self._family.name == "llama" and (".attn_q." in gguf or ".attn_k." in gguf):
            heads = self._config.num_attention_heads if ".attn_q." in gguf else self._config.num_key_value_heads
        shape = tuple(value.shape)
        small = value.dim() < 2 or "ffn_gate_inp" in gguf or gguf.endswith("bias") or "norm" in gguf
        kind = "F32" if small else self._kind
        if kind not in ("F32", "F16", "BF16"):
            raw = random_blocks(kind, shape)
            restored = values(kind, raw, shape)
            return Stored(kind, shape, raw.numpy().tobytes()), _of_pairs(restored, heads)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        if self._family.plus_one and "norm" in gguf:
            value = value + 1
        restored = value - 1 if self._family.plus_one and "norm" in gguf else value
        raw = _to_pairs(value, heads).to(dtype).contiguous().view(torch.uint8)
        return Stored(kind, shape, raw.numpy().tobytes()), restored


def _to_pairs(rows: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Put element i of the first half of each head before element i of its second half."""
    if heads is None:
        return rows
    size = rows.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def _of_pairs(rows: torch.Tensor, heads: int | None) -> torch.Tensor:
    """The inverse of `_to_pairs`."""
    if heads is None:
        return rows
    restored = torch.empty_like(rows)
    restored[_to_pairs(torch.arange(rows.shape[0]), heads)] = rows
    return restored
