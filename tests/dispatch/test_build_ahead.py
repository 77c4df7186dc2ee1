"""Whole models that compute on the host with weights on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch import disk_offload, dispatch_model, undispatch
from bigmodel.dispatch.attach import AttachedForward
from bigmodel.dispatch.dispatched import dispatched
from bigmodel.errors import CheckpointFormatError

from .models import ids, llama, stack


def test_the_model_computes_the_same_with_its_weights_on_disk(tmp_path: Path) -> None:
    plain, model = llama(), disk_offload(llama(), tmp_path, "cpu")
    tokens = torch.arange(10)[None]
    assert mapped_region(model.model.layers[0].mlp.up_proj.weight) is not None
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-5)
    assert dispatched(model).readers[0].stats.hits > 0  # type: ignore[union-attr]


def test_only_what_lies_on_disk_is_attached_to(tmp_path: Path) -> None:
    model = stack()
    device_map = {"": "cpu", "blocks.1": "disk", "blocks.3": "disk"}
    dispatch_model(model, device_map, offload_dir=tmp_path)
    attached = [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), AttachedForward)]
    assert attached == ["blocks.1", "blocks.3"]
    assert torch.allclose(model(ids()), stack()(ids()), atol=1e-6)
    undispatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_embedding_on_disk_is_looked_up_and_not_brought_in(tmp_path: Path) -> None:
    model = llama()
    dispatch_model(model, {"": "cpu", "model.embed_tokens": "disk"}, offload_dir=tmp_path)
    (reader,) = dispatched(model).readers  # type: ignore[union-attr]
    assert [(block.name, block.nbytes) for block in reader.blocks] == [("model.embed_tokens", 0)]


def test_weights_can_be_trained_where_they_lie(tmp_path: Path) -> None:
    plain, model = stack(), disk_offload(stack(), tmp_path, "cpu")
    for trained in (plain, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(3):
            trained(ids()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), model.parameters()):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_file_cut_short_fails_the_forward_and_leaves_the_process_alive(tmp_path: Path) -> None:
    from bigmodel.checkpoint import save_model
    from bigmodel.dispatch import load_checkpoint_and_dispatch

    save_model(llama(), tmp_path)
    model = load_checkpoint_and_dispatch(llama(), tmp_path, {"": "disk"})
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        model(tokens)
        path = tmp_path / "model.safetensors"
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointFormatError, match="cut short"):
            model(tokens)
