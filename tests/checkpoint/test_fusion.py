from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from bigmodel.checkpoint import Checkpoint, convert_keys
from bigmodel.checkpoint.fusion import Fusion
from bigmodel.devices.empty import init_empty_weights
from bigmodel.errors import CheckpointMismatchError
from bigmodel.sources.headers import TensorEntry
from tests.checkpoint.helpers import same_bits
from tests.checkpoint.transformers_models import MIXTURES, MODELS, saved


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
        pieces = source.fusion.pieces()
        assert pieces is not None
        whole = torch.empty(source.shape, dtype=source.dtype)
        for piece in pieces:
            whole[piece.index].copy_(checkpoint.tensor(piece.key))
        assert same_bits(whole, source.fusion.evaluate(lambda entry: checkpoint.tensor(entry.name))[fused])


def test_stacked_tensors_have_pieces() -> None:
    parts = {"x": [torch.rand(2, 3) for _ in range(4)]}
    made = fusion(WeightConverter("x", "out", [MergeModulelist(dim=0)]), parts)
    assert [piece.index for piece in made.pieces() or []] == [(0,), (1,), (2,), (3,)]
    assert made.targets()["out"].shape == (4, 2, 3)
    assert made.targets()["out"].is_meta
    assert made.keys == ("x.0", "x.1", "x.2", "x.3")
    assert [type(operation) for operation in made.operations] == [MergeModulelist]


def test_parts_of_different_size_are_placed_one_after_the_other_in_the_order_of_the_patterns() -> None:
    parts = {"b": [torch.rand(3, 2) for _ in range(2)], "a": [torch.rand(1, 2) for _ in range(2)]}
    made = fusion(WeightConverter(["a", "b"], "out", [MergeModulelist(dim=0), Concatenate(dim=1)]), parts)
    pieces = made.pieces()
    assert pieces is not None
    whole = torch.empty(made.targets()["out"].shape)
    for piece in pieces:
        whole[piece.index].copy_(values(parts)[piece.key])
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
def test_what_is_more_than_stacking_has_no_pieces(
    converter: WeightConverter, parts: dict[str, list[torch.Tensor]]
) -> None:
    assert fusion(converter, parts).pieces() is None


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
