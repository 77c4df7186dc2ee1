"""Checkpoints are quantised to published formats, that their own library reads the same values from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bigmodel.checkpoint import quantize as module
from bigmodel.checkpoint.quantize import quantize_checkpoint
from bigmodel.dispatch import from_pretrained
from bigmodel.errors import BudgetError, CheckpointError
from bigmodel.quantized.encode import TARGETS, encoding
from tests.quantized.checkpoints import LAYERS, TOKENS, gpt_oss, llama, mixtral, restore
from tests.quantized.twins import Twin

ERROR = {"int4": 0.12, "int8": 0.008, "fp8": 0.03, "mxfp4": 0.16}
"""Largest relative error, in the root mean square, of normally distributed weights."""


@pytest.fixture
def full(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "full")
    (tmp_path / "full" / "tokenizer.json").write_text("{}")
    return tmp_path / "full"


def group(target: str) -> int | None:
    return 32 if target == "int4" else None


@pytest.mark.parametrize("target", TARGETS)
def test_a_weight_is_restored_near_its_value(target: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    chosen = encoding(target, group(target))
    found = chosen.format.restore(chosen.encode(weight), (24, 64), torch.float32)
    assert ((found - weight).square().mean().sqrt() / weight.square().mean().sqrt()) < ERROR[target]
    assert torch.equal(
        chosen.format.restore(chosen.encode(torch.zeros(8, 64)), (8, 64), torch.float32), torch.zeros(8, 64)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_values_of_a_format_are_kept(target: str) -> None:
    torch.manual_seed(0)
    chosen = encoding(target, group(target))
    once = chosen.format.restore(chosen.encode(torch.randn(24, 64)), (24, 64), torch.float32)
    if target in ("fp8", "mxfp4"):
        assert torch.equal(chosen.format.restore(chosen.encode(once), (24, 64), torch.float32), once)
    assert once.unique().numel() > 8


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_loads_and_computes_with_the_restored_weights(target: str, full: Path, tmp_path: Path) -> None:
    found = quantize_checkpoint(full, tmp_path / "out", target, group(target))
    assert found.weights == 7 * LAYERS
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    written, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(full / "model.safetensors")
    assert found.after == sum(tensor.nbytes for tensor in written.values()) < found.before
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    twin = Twin("", config["quantization_config"], lambda _: {}, lambda *_: torch.empty(0), "")
    for name, weight in before.items():
        if name.removesuffix("weight") + "weight_scale" in written:
            own = {
                key.rpartition(".")[2]: t for key, t in written.items() if key.startswith(name.removesuffix("weight"))
            }
            before[name] = restore(twin, own, (weight.shape[0], weight.shape[1]))
        else:
            assert torch.equal(written[name], weight)
    save_file(before, full / "model.safetensors", {"format": "pt"})
    whole = AutoModelForCausalLM.from_pretrained(full, dtype=torch.bfloat16).eval()
    model = from_pretrained(tmp_path / "out", device_map="cpu", context_length=16)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


@pytest.mark.parametrize("target", TARGETS)
def test_compressed_tensors_reads_the_same_values(target: str, full: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor

    quantize_checkpoint(full, tmp_path / "out", target, group(target))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    read = library.quantization.QuantizationConfig.model_validate(
        {key: value for key, value in config.items() if key != "quant_method"}
    )
    scheme = read.config_groups["group_0"]
    twin = Twin("", config, lambda _: {}, lambda *_: torch.empty(0), "")
    prefix = "model.layers.1.mlp.down_proj."
    own = {key.removeprefix(prefix): tensor for key, tensor in written.items() if key.startswith(prefix)}
    expected = BaseCompressor.get_value_from_registry(config["format"]).decompress(own, scheme)["weight"]
    assert torch.equal(restore(twin, own, (64, 96)), expected.to(torch.bfloat16))


@pytest.mark.slow
def test_experts_are_quantised_and_routers_are_not(tmp_path: Path) -> None:
    mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "full")
    found = quantize_checkpoint(tmp_path / "full", tmp_path / "out", "int4", 32)
    assert found.weights == LAYERS * (4 + 8 * 3)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_packed" in names
    from_pretrained(tmp_path / "out", device_map="cpu", context_length=16)(TOKENS)


@pytest.mark.slow
def test_gpt_oss_gets_its_own_form_of_mxfp4(tmp_path: Path) -> None:
    gpt_oss().to(torch.bfloat16).save_pretrained(tmp_path / "full")
    found = quantize_checkpoint(tmp_path / "full", tmp_path / "out", "mxfp4")
    assert found.weights == 2 * LAYERS
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {
        f"model.layers.0.mlp.experts.{n}_proj_{leaf}" for n in ("gate_up", "down") for leaf in ("blocks", "scales")
    } < names
    from_pretrained(tmp_path / "out", device_map="cpu", context_length=16)(TOKENS)
    with pytest.raises(
        CheckpointError, match="stored as one tensor for each layer, which int4 has no published form of"
    ):
        quantize_checkpoint(tmp_path / "full", tmp_path / "other", "int4")


def test_shards_keep_within_a_budget(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERMEDIATE_BYTES", 0)
    quantize_checkpoint(full, tmp_path / "out", "int8", max_memory=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) < 30_000 for file in files)
    with torch.no_grad():
        from_pretrained(tmp_path / "out", device_map="cpu", context_length=16)(TOKENS)
    with pytest.raises(BudgetError, match=r"embed_tokens\.weight takes 8\.0 KiB|takes 8"):
        quantize_checkpoint(full, tmp_path / "small", "int8", max_memory=9_000)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_when_it_is_interrupted(
    error: type[BaseException], full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_copy_files", fail)
    with pytest.raises(error):
        quantize_checkpoint(full, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_what_cannot_be_done_is_refused_before_anything_is_written(full: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(full, full, "int8")
    with pytest.raises(CheckpointError, match="cannot be quantised to 'int3'; int4, int8, fp8, mxfp4 are possible"):
        quantize_checkpoint(full, tmp_path / "out", "int3")
    with pytest.raises(CheckpointError, match=r"to int4: rows of .* do not fill groups; use --to int8"):
        quantize_checkpoint(full, tmp_path / "groups", "int4")
    with pytest.raises(CheckpointError, match="only int4 has groups"):
        quantize_checkpoint(full, tmp_path / "out", "fp8", 64)
    quantize_checkpoint(full, tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "int8")


@pytest.mark.slow
def test_rows_that_do_not_fill_groups_stay_whole(full: Path, tmp_path: Path) -> None:
    found = quantize_checkpoint(full, tmp_path / "out", "int4", 64)
    assert found.kept == tuple(f"model.layers.{n}.mlp.down_proj.weight" for n in range(LAYERS))
    from_pretrained(tmp_path / "out", device_map="cpu", context_length=16)(TOKENS)
