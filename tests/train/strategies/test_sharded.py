"""What FSDP2 and tensor parallelism share: optimizers find the sharded parameters, clipping their parts."""

from __future__ import annotations

import torch

from tests.train.multiprocess import on_ranks

from .small_sharded import full, sharded


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
