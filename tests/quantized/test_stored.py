"""Stored tensors are moved, and never cast."""

from __future__ import annotations

from pathlib import Path

import torch

from bigmodel.dispatch import from_pretrained
from bigmodel.quantized.stored import stored_names

from .checkpoints import TOKENS, published
from .twins import bnb4, packed


def test_a_dtype_is_that_of_restored_weights(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed()).float()
    model = from_pretrained(tmp_path / "q", device_map="cpu", dtype="float32", context_length=16)
    names = stored_names(model)
    assert len(names) == 3 * 21
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {kinds[name] for name in names} == {torch.int32, torch.bfloat16, torch.int64}
    assert {kinds[name] for name in kinds.keys() - names} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


def test_casting_a_model_casts_what_its_weights_are_restored_to(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed()).float()
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    before = {name: model.get_parameter(name).clone() for name in stored_names(model)}
    model.float()
    assert all(model.get_parameter(name).dtype == tensor.dtype for name, tensor in before.items())
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


def test_a_state_dict_has_published_names_and_loads_again(tmp_path: Path) -> None:
    published(tmp_path / "q", bnb4(nested=True))
    model, other = (from_pretrained(tmp_path / "q", device_map="cpu", context_length=16) for _ in range(2))
    saved = model.state_dict()
    assert "model.layers.0.self_attn.q_proj.weight.nested_absmax" in saved
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        other.load_state_dict(saved)
        assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)


def test_a_weight_that_is_read_outside_its_layer_is_restored(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed())
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    found = model.model.layers[1].mlp.down_proj
    assert torch.equal(found.weight, whole.model.layers[1].mlp.down_proj.weight)
    assert "weight" not in dict(found.named_parameters())
    assert "int4, groups of 32" in repr(found)
