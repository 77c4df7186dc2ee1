"""Writes the Llama of a checkpoint as a GGUF file with the same values, for llama.cpp to compute with.

Weights in bfloat16 and float32 stay so. int8 with a scale for each row becomes Q8_0, int4 in groups of 32 becomes Q4_0:
both have a float16 scale for each 32 elements, which holds the scales of random weights exactly. The tokenizer is a
list of names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 32
GROUP = 32
"""Elements of a block of Q8_0 and Q4_0."""

F32, Q4_0, Q8_0, BF16 = 0, 2, 8, 30
"""Numbers of types in files."""


def gguf_of(folder: Path) -> Path:
    """Return the GGUF file beside the checkpoint `folder`, after writing it if it does not exist.

    Raises:
        BenchmarkError: A scale is not a float16.
    """
    path = folder.parent / f"{folder.name}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _write(partial, folder)
        partial.rename(path)
    return path


def _write(path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = list(_tensors(folder, config))
    metadata = _metadata(config)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_string(key) + _typed(value) for key, value in metadata.items()]
    at = 0
    for name, kind, shape, raw in tensors:
        sizes = tuple(reversed(shape))
        head.append(_string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at))
        at += raw.numel() + -raw.numel() % ALIGNMENT
    with path.open("wb") as file:
        written = b"".join(head)
        file.write(written + bytes(-len(written) % ALIGNMENT))
        for _, _, _, raw in tensors:
            file.write(raw.numpy().tobytes() + bytes(-raw.numel() % ALIGNMENT))


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, int, tuple[int, ...], torch.Tensor]]:
    """Yield name, type, shape in elements, and bytes of each tensor of the file."""
    import torch

    from bigmodel.checkpoint import Checkpoint

    saved = Checkpoint.open(folder)
    for module in dict.fromkeys(key.rpartition(".")[0] for key in saved):
        leaves = {key.rpartition(".")[2]: saved[key] for key in saved if key.rpartition(".")[0] == module}
        kind, rows = _rows(leaves)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(module.rpartition(".")[2])
        if heads is not None:
            rows = rows.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
        elements = {F32: 4, BF16: 2, Q8_0: (2 + GROUP) / GROUP, Q4_0: (2 + GROUP // 2) / GROUP}[kind]
        shape = (*rows.shape[:-1], int(rows.shape[-1] / elements))
        yield _name(module), kind, shape, rows.contiguous().view(torch.uint8).flatten()


def _rows(leaves: dict[str, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Return the type of a module's weight in the file, and its bytes: uint8, (rows, bytes of a row)."""
    import torch

    weight = leaves.get("weight")
    if weight is not None and weight.dtype != torch.int8:
        if weight.dtype == torch.bfloat16 and weight.dim() > 1:
            return BF16, weight.contiguous().view(torch.uint8)
        return F32, weight.float().contiguous().view(torch.uint8)
    scale = leaves["weight_scale"]
    half = scale.half()
    if not torch.equal(half.float(), scale.float()):
        raise BenchmarkError("a scale is not a float16, so a GGUF file cannot have the same values")
    if weight is not None:
        blocks = weight.unflatten(1, (-1, GROUP)).view(torch.uint8)
        scales = half.unsqueeze(1).expand(-1, blocks.shape[1], -1)
        return Q8_0, torch.cat([scales.contiguous().view(torch.uint8), blocks], 2).flatten(1)
    octets = leaves["weight_packed"].contiguous().view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], -1).flatten(1).unflatten(1, (-1, GROUP))
    pairs = codes[..., : GROUP // 2] | (codes[..., GROUP // 2 :] << 4)  # element i beside element i + 16
    return Q4_0, torch.cat([half.unsqueeze(-1).contiguous().view(torch.uint8), pairs], 2).flatten(1)


def _name(module: str) -> str:
    from bigmodel.sources.gguf.names import IN_LAYERS, OUTSIDE

    names = {ours: theirs for theirs, ours in (OUTSIDE | IN_LAYERS).items()}
    if module in names:
        return f"{names[module]}.weight"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[inner]}.weight"


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata: u32, f32, text, or lists of one of them."""
    size, vocabulary = config["hidden_size"] // config["num_attention_heads"], config["vocab_size"]
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    return {
        "general.architecture": "llama",
        "llama.context_length": config["max_position_embeddings"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": size,
        "llama.rope.freq_base": float(theta),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"▁{number}" for number in range(3, vocabulary))],
        "tokenizer.ggml.scores": [-float(number) for number in range(vocabulary)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (vocabulary - 3)],
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind, _ = _plain(value[0])
        kind = 5 if kind == 4 else kind  # lists of integers are signed
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_plain(each)[1] for each in value)
    kind, content = _plain(value)
    return struct.pack("<I", kind) + content


def _plain(value: Any) -> tuple[int, bytes]:
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (8, _string(value))
