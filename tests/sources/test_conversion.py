"""The oracle of every test here is transformers' own ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertForMaskedLM, LlamaForCausalLM, LlamaModel, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from bigmodel.checkpoint import Checkpoint, convert_keys, load_checkpoint_in_model, mapped_region
from bigmodel.devices.empty import init_empty_weights
from bigmodel.errors import CheckpointMismatchError
from bigmodel.sources.conversion import Fusion
from bigmodel.sources.headers import TensorEntry
from tests.checkpoint.helpers import Tied, assert_same, same_bits
from tests.checkpoint.transformers_models import MIXTURES, MODELS, model_class, saved

from ..examples import alike


class Model:
    """As much of a model as transformers' operations ask for."""

    config = None


def fusion(converter: WeightConverter, parts: dict[str, list[torch.Tensor]], name: str = "out") -> Fusion:
    made = Fusion(name, converter, Model())
    for pattern, tensors in parts.items():
        for i, tensor in enumerate(tensors):
            made.add(pattern, TensorEntry(f"{pattern}.{i}", tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes))
    return made


def values(parts: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{pattern}.{i}": tensor for pattern, tensors in parts.items() for i, tensor in enumerate(tensors)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_the_pieces_of_real_mixtures_make_what_the_operations_make(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(saved(name, tmp_path))
    with init_empty_weights():
        model = MODELS[name]()
    entries = {key: checkpoint.entry(key) for key in checkpoint}
    conversion = convert_keys(model, dict.fromkeys(model.state_dict(), True), entries)
    assert conversion.fused
    for fused in conversion.fused:
        source = conversion.sources[fused]
        assert source.fusion is not None
        parts = source.fusion.parts()
        assert parts is not None
        whole = torch.empty(source.shape, dtype=source.dtype)
        for piece in parts:
            whole[piece.index].copy_(checkpoint.tensor(piece.key))
        assert same_bits(whole, source.fusion.evaluate(lambda entry: checkpoint.tensor(entry.name))[fused])


def test_stacked_tensors_have_pieces() -> None:
    parts = {"x": [torch.rand(2, 3) for _ in range(4)]}
    made = fusion(WeightConverter("x", "out", [MergeModulelist(dim=0)]), parts)
    assert [piece.index for piece in made.parts() or []] == [(0,), (1,), (2,), (3,)]
    assert made.targets()["out"].shape == (4, 2, 3)
    assert made.targets()["out"].is_meta
    assert made.keys == ("x.0", "x.1", "x.2", "x.3")
    assert [type(operation) for operation in made.operations] == [MergeModulelist]


def test_parts_of_different_size_are_placed_one_after_the_other_in_the_order_of_the_patterns() -> None:
    parts = {"b": [torch.rand(3, 2) for _ in range(2)], "a": [torch.rand(1, 2) for _ in range(2)]}
    made = fusion(WeightConverter(["a", "b"], "out", [MergeModulelist(dim=0), Concatenate(dim=1)]), parts)
    placed = made.parts()
    assert placed is not None
    whole = torch.empty(made.targets()["out"].shape)
    for part in placed:
        whole[part.index].copy_(values(parts)[part.key])
    assert same_bits(whole, made.evaluate(lambda entry: values(parts)[entry.name])["out"])


@pytest.mark.parametrize(
    ("converter", "parts"),
    [
        (WeightConverter("x", "out", [MergeModulelist(dim=1)]), {"x": [torch.rand(2, 3)] * 2}),
        (WeightConverter("x", "out", [Transpose(0, 1)]), {"x": [torch.rand(2, 3)]}),
        (WeightConverter("x", "out", [MergeModulelist(dim=0), Transpose(1, 2)]), {"x": [torch.rand(2, 3)] * 2}),
        (WeightConverter("x", ["out", "two"], [Chunk(dim=0)]), {"x": [torch.rand(4, 3)]}),
    ],
    ids=["other_dimension", "transposed", "stacked_and_transposed", "split"],
)
def test_conversions_beyond_stacking_have_no_pieces(
    converter: WeightConverter, parts: dict[str, list[torch.Tensor]]
) -> None:
    assert fusion(converter, parts).parts() is None


def test_one_tensor_may_become_several() -> None:
    parts = {"qkv": [torch.rand(6, 2)]}
    made = fusion(WeightConverter("qkv", ["q", "k", "v"], [Chunk(dim=0)]), parts, name="layer.q")
    assert {name: tuple(t.shape) for name, t in made.targets().items()} == {
        "layer.q": (2, 2),
        "layer.k": (2, 2),
        "layer.v": (2, 2),
    }
    result = made.evaluate(lambda entry: values(parts)[entry.name])
    assert same_bits(torch.cat(list(result.values())), parts["qkv"][0])


def test_a_conversion_can_be_applied_again() -> None:
    parts = {"x": [torch.rand(2, 3) for _ in range(3)]}
    made = fusion(WeightConverter("x", "out", [MergeModulelist(dim=0)]), parts)
    first, second = (made.evaluate(lambda entry: values(parts)[entry.name])["out"] for _ in range(2))
    assert same_bits(first, second)


def test_tensors_that_do_not_fit_each_other_are_named() -> None:
    parts = {"x": [torch.rand(2, 3), torch.rand(3, 3)]}
    made = fusion(WeightConverter("x", "out", [MergeModulelist(dim=0)]), parts)
    with pytest.raises(CheckpointMismatchError, match=r"out is made from 2 tensors of the checkpoint \(x\.0, x\.1\)"):
        made.targets()


def empty(name: str) -> PreTrainedModel:
    with init_empty_weights():
        return MODELS[name]()


def conversion_of(model: torch.nn.Module, folder: Path):
    checkpoint = Checkpoint.open(folder)
    entries = {key: checkpoint.entry(key) for key in checkpoint}
    return convert_keys(model, dict.fromkeys(model.state_dict(), True), entries)


@pytest.mark.slow
@alike("device_map", [{"": "disk"}, None, {"": "cpu"}], first=2, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_as_from_pretrained_loads_it(
    name: str, device_map: dict[str, str] | None, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "saved")
    expected = model_class(name).from_pretrained(folder)
    model = empty(name)

    load_checkpoint_in_model(model, folder, device_map, offload_folder=tmp_path / "offload", strict=True)

    assert_same(model.state_dict(), expected.state_dict())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if device_map == {"": "disk"}:
        assert all(mapped_region(parameter) is not None for parameter in model.parameters())
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        inputs = {"decoder_input_ids": tokens} if name == "t5" else {}
        outputs = [m.eval()(input_ids=tokens, **inputs).logits for m in (model, expected)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_saved_one_by_one_are_fused(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    assert any(".experts.11." in key or ".experts.3." in key for key in Checkpoint.open(folder)), "one by one"
    conversion = conversion_of(empty(name), folder)
    assert conversion.fused != []
    assert all(".experts." in name for name in conversion.fused)
    for fused in conversion.fused:
        source = conversion.sources[fused]
        assert not source.in_place
        assert len(source.keys) == source.shape[0] * (2 if "gate_up" in fused else 1)
    assert conversion.unexpected == []


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_saved_fused_are_used_in_place(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "one_by_one")
    expected = model_class(name).from_pretrained(folder).state_dict()
    (tmp_path / "fused").mkdir()
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, tmp_path / "fused" / "model.safetensors")

    model = empty(name)
    assert conversion_of(model, tmp_path / "fused").fused == []
    load_checkpoint_in_model(model, tmp_path / "fused", {"": "disk"}, strict=True)
    assert_same(model.state_dict(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt", "bert", "mixtral"])
def test_a_base_model_s_checkpoint_loads_into_a_model_with_a_head_and_back(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "with_head")
    base = AutoModel.from_pretrained(folder)
    base.save_pretrained(tmp_path / "base")

    with init_empty_weights():
        bare = type(base)(base.config, **({"add_pooling_layer": True} if name == "bert" else {}))
    if name == "bert":
        bare.pooler = None  # the saved one was made up by from_pretrained
        base.pooler = None
    load_checkpoint_in_model(bare, folder)
    assert_same(bare.state_dict(), base.state_dict())

    torch.manual_seed(1)
    with_head = MODELS[name]()
    head = {key: tensor.clone() for key, tensor in with_head.state_dict().items()}
    load_checkpoint_in_model(with_head, tmp_path / "base")
    prefix = f"{with_head.base_model_prefix}."
    expected = {key: base.state_dict().get(key.removeprefix(prefix), head[key]) for key in head}
    if name == "llama_tied" or name in ("gpt2", "opt", "bert"):
        for tied, kept in with_head.all_tied_weights_keys.items():
            expected[tied] = expected[kept]
    assert_same(with_head.state_dict(), expected)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path / "with_head")
    LlamaModel.from_pretrained(tmp_path / "with_head").save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight is not in the checkpoint"):
        load_checkpoint_in_model(empty("llama"), tmp_path / "base")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "saved")
    tensors = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    lost = next(key for key in tensors if ".experts.7.w1" in key)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"experts\.gate_up_proj is made from 23 tensors"):
        load_checkpoint_in_model(empty("mixtral"), tmp_path / "model.safetensors")


def test_keys_that_the_class_says_to_ignore_are_not_unexpected(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "saved")
    tensors = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    tensors["transformer.h.0.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["really.unexpected"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert conversion_of(empty("gpt2"), tmp_path / "model.safetensors").unexpected == ["really.unexpected"]


def test_a_loaded_model_is_saved_in_the_layout_it_came_in(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "saved")
    model = empty("mixtral")
    load_checkpoint_in_model(model, folder)
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert_same(Checkpoint.open(tmp_path / "again"), Checkpoint.open(folder))


def test_values_that_differ_under_tied_names_are_not_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = MODELS["llama"]().state_dict()
    model = empty("llama_tied")
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = LlamaForCausalLM.from_pretrained(tmp_path)

    load_checkpoint_in_model(model, tmp_path)

    assert_same(model.state_dict(), expected.state_dict())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.all_tied_weights_keys == expected.all_tied_weights_keys == {}
    assert "they are loaded untied" in caplog.text


def test_ties_that_were_lost_on_the_way_to_meta_are_found_again(tmp_path: Path) -> None:
    folder = saved("llama_tied", tmp_path)
    model = empty("llama_tied")
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    load_checkpoint_in_model(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_any_other_module_takes_the_keys_as_they_are(tmp_path: Path) -> None:
    model = Tied()
    save_file({"scale": torch.ones(4), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    conversion = conversion_of(model, tmp_path)
    assert {name: source.keys for name, source in conversion.sources.items()} == {"scale": ("scale",)}
    assert conversion.unexpected == ["other"]
    assert conversion.fused == []


def test_old_names_are_renamed(tmp_path: Path) -> None:
    """Checkpoints of before 2020 call the parameters of a layer norm gamma and beta."""
    folder = saved("bert", tmp_path / "saved")
    tensors = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / "model.safetensors")
    model = empty("bert")
    load_checkpoint_in_model(model, tmp_path / "model.safetensors", {"": "disk"}, strict=True)
    assert_same(model.state_dict(), BertForMaskedLM.from_pretrained(folder).state_dict())


@pytest.mark.parametrize(
    ("name", "old", "new", "makes"),
    [
        ("llama_tied", "", "", False),
        ("llama_tied", "mlp.", "other.", True),
        ("bert", "LayerNorm.weight", "LayerNorm.gamma", True),
        ("mixtral", "", "", True),
    ],
)
def test_rules_are_made_for_classes_that_have_some_and_for_keys_that_are_no_names(
    name: str, old: str, new: str, makes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making those of all classes takes as long as loading a small model."""
    made = []

    def make(build: Any = conversion_mapping._build_checkpoint_conversion_mapping) -> Any:
        made.append(1)
        return build()

    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(conversion_mapping, "_build_checkpoint_conversion_mapping", make)
    model = empty(name)
    names = dict.fromkeys(model.state_dict(), True)
    keys = [key.replace(old, new) if old else key for key in names]
    entries = {key: TensorEntry(key, torch.float32, (1,), 0, 4) for key in keys}
    found = convert_keys(model, names, entries)
    assert bool(made) is makes
    assert found.sources.keys() == (names.keys() if new != "other." else {key for key in names if old not in key})
