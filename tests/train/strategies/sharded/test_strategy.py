"""Checkpoints, exports, optimizers and clipping shared by FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel import FullyShardedDataParallelPlugin
from bigmodel.errors import CheckpointNotFoundError, TrainError
from bigmodel.train import Accelerator
from tests.train.multiprocess import on_ranks, run_on_ranks

from .. import split
from ..small_sharded import full, sharded


def save_and_load_with_transformers(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    accelerator.save_model(accelerator.prepare(model), folder)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.config.hidden_size == 16
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_a_saved_model_has_the_config_with_which_transformers_loads_it(tmp_path: Path) -> None:
    run_on_ranks(save_and_load_with_transformers, tmp_path, modules=split.MODULES)


@on_ranks
@pytest.mark.slow
def test_one_file_comes_back_and_a_missing_one_is_an_error_on_both(folder: Path) -> None:
    accelerator, model, optimizer = sharded(state_dict_type="FULL_STATE_DICT")
    model, optimizer = accelerator.prepare(model, optimizer)
    before = full(accelerator, model)
    accelerator.save_state(folder / "state")
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    accelerator.load_state(folder / "state")
    after = full(accelerator, model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "state" / "model.safetensors").unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointNotFoundError):
        accelerator.load_state(folder / "state")


@on_ranks
def test_an_optimizer_without_its_model_cannot_be_stored_by_name(folder: Path) -> None:
    accelerator, model, _ = sharded()
    other = nn.Linear(4, 2)
    accelerator.prepare(model, other)
    stranger = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(TrainError, match="prepare the model and its optimizer in one call"):
        accelerator.strategy.save_optimizer(stranger, None, folder, 0)


@on_ranks
def test_an_optimizer_prepared_later_changes_the_sharded_weights() -> None:
    accelerator, model, optimizer = sharded()
    before = model.bias.detach().clone()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    state = full(accelerator, model)
    if accelerator.is_main_process:
        assert torch.equal(state["bias"], before - 1)


@on_ranks
def test_values_are_clipped_part_by_part() -> None:
    accelerator, model, optimizer = sharded()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.full((1, 4), 3.0)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert all(bool((p.grad.full_tensor().abs() <= 0.5).all()) for p in model.parameters())
