"""Models in GGUF files compute what the models of transformers that they stand for do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch import from_pretrained
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from bigmodel.profile import profile_source
from bigmodel.quantized.linear import QuantizedLinear
from bigmodel.sources.gguf.header import read_gguf_header

from ..accelerators import at
from ..examples import alike, some
from .checkpoints import TOKENS
from .gguf_files import FAMILIES, GEMMA2, GEMMA3, GPT_OSS, LLAMA, MIXTRAL, QWEN2, QWEN3, Family, gguf_file


@pytest.mark.slow
@alike("kind", ["Q4_0", "F16"], first=1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.make.__name__)
def test_a_model_computes_bit_for_bit_what_its_dequantised_self_does(family: Family, kind: str, tmp_path: Path) -> None:
    kind = "MXFP4" if family is GPT_OSS and kind == "Q4_0" else kind
    whole = gguf_file(tmp_path / "m.gguf", family, kind)
    model = from_pretrained(tmp_path / "m.gguf", device_map="cpu", context_length=16)
    assert model.dtype == whole.dtype
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_type_is_computed_with(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    whole = gguf_file(tmp_path / "m.gguf", LLAMA, kind, metadata={"llama.rope.dimension_count": 64}, **sizes)
    model = from_pretrained(tmp_path / "m.gguf", device_map="cpu", context_length=16)
    assert {str(module.format.label) for module in model.modules() if isinstance(module, QuantizedLinear)} == {
        f"gguf {kind}, blocks of {32 if kind == 'Q8_0' else 256}"
    }
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


ENDS: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"": 0},
    "streamed from RAM": {**ENDS, **{f"model.layers.{n}": "cpu" for n in range(3)}},
    "streamed from disk": {**ENDS, **{f"model.layers.{n}": "disk" for n in range(3)}},
    "on disk, computed on the host": {"": "disk"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize(
    ("family", "placement"),
    [
        *((LLAMA, placement) for placement in PLACEMENTS if placement != "streamed from disk"),
        pytest.param(LLAMA, "streamed from disk", marks=pytest.mark.long),
        pytest.param(GEMMA3, "streamed from disk", marks=pytest.mark.long),
        *((family, "streamed from disk") for family in some([QWEN3], first=0)),
        pytest.param(MIXTRAL, "streamed from RAM", marks=pytest.mark.long),
        *((MIXTRAL, each) for each in some([*PLACEMENTS][2:], first=0)),
        pytest.param(GPT_OSS, "streamed from disk", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=lambda each: each if isinstance(each, str) else each.make.__name__,
)
def test_every_placement_gives_the_same_bits(family: Family, placement: str, tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "m.gguf", family, "MXFP4" if family is GPT_OSS else "Q8_0")
    model = from_pretrained(tmp_path, device_map=PLACEMENTS[placement], context_length=16, batch_size=2)
    if placement != "on disk, computed on the host":
        whole = whole.to(at(0))
    with torch.no_grad():
        expected = whole(TOKENS.to(whole.device)).logits.cpu()
        for _ in range(2):
            assert torch.equal(model(TOKENS.to(whole.device)).logits.cpu(), expected)


@pytest.mark.slow
def test_a_split_model_is_opened_by_its_folder_or_any_of_its_files(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "m.gguf", GPT_OSS, "MXFP4", files=3)
    with torch.no_grad():
        expected = whole(TOKENS).logits
        for path in (tmp_path, tmp_path / "m-00001-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf"):
            model = from_pretrained(path, device_map="cpu", context_length=16)
            assert torch.equal(model(TOKENS).logits, expected)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"is one of 3 files, of which m-00002-of-00003\.gguf is not in"):
        from_pretrained(tmp_path)


@alike("family", [QWEN3, MIXTRAL, GPT_OSS], first=1, ids=lambda family: family.make.__name__)
@pytest.mark.slow
def test_planned_bytes_are_those_of_the_header(family: Family, tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", family, "MXFP4" if family is GPT_OSS else "Q8_0")
    tensors = read_gguf_header(tmp_path / "m.gguf").tensors.values()
    wide = sum(tensor.nbytes for tensor in tensors if tensor.type.name == "F32")  # loaded as bfloat16
    assert profile_source(tmp_path / "m.gguf").weights == sum(tensor.nbytes for tensor in tensors) - wide // 2


def test_weights_are_used_where_they_lie_in_the_file(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", LLAMA, "Q8_0")
    model = from_pretrained(tmp_path / "m.gguf", device_map={"": "disk"}, context_length=16)
    weight = model.model.layers[1].self_attn.q_proj.weight_q8_0
    region = mapped_region(weight)
    assert region is not None
    tensor = read_gguf_header(tmp_path / "m.gguf").tensors["blk.1.attn_q.weight"]
    assert (region.path, region.offset, region.nbytes) == (tmp_path / "m.gguf", tensor.offset, tensor.nbytes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba' is not supported in GGUF files; llama, qwen2"),
        ({"llama.block_count": 2**31}, "its metadata llama.block_count is 2147483648, not an integer from 1"),
        ({"llama.block_count": 7}, "its metadata llama.block_count is 7, not the number of its layers"),
        ({"llama.embedding_length": 32}, "its metadata llama.embedding_length is 32, not 64"),
        ({"llama.attention.head_count": 0}, "its metadata llama.attention.head_count is 0, not an integer from 1"),
        ({"llama.rope.freq_base": float("nan")}, "its metadata llama.rope.freq_base is nan, not a positive number"),
        ({"llama.rope.scaling.type": "odd"}, "rope.scaling.type is 'odd', not none, linear or yarn"),
        (
            {"llama.attention.head_count_kv": 3},
            r"k_proj\.weight is stored as gguf \(48 x 64, .*its weight_q4_0 has the shape",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_one_clear_line(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", LLAMA, metadata=metadata)
    with pytest.raises(CheckpointFormatError, match=message):
        from_pretrained(tmp_path / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("family", [LLAMA, QWEN2, GEMMA2, GEMMA3], ids=lambda family: family.make.__name__)
def test_transformers_reads_the_same_weights_from_a_file(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with the package accelerate")
    gguf_file(tmp_path / "m.gguf", family, "Q8_0", metadata={"general.name": "tiny", f"{family.name}.vocab_size": 64})
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16)
    model = from_pretrained(tmp_path / "m.gguf", device_map="cpu", context_length=16)
    for name, weight in whole.named_parameters():
        module, _, leaf = name.rpartition(".")
        assert torch.equal(getattr(model.get_submodule(module), leaf), weight), name
