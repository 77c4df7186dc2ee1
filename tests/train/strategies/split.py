"""A small Llama trained with its layers split over ranks, its losses written to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel.train import Accelerator
from bigmodel.train.strategies.sharded.fsdp_plugin import FullyShardedDataParallelPlugin
from bigmodel.train.strategies.sharded.parallelism import ParallelismConfig, TorchTensorParallelPlugin

MODULES = ("transformers.models.llama.modeling_llama",)
"""What ranks that use these models have imported when they start, beside PyTorch."""

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=0,
)
STEPS, SAVED = 6, 2
"""Training steps, and the one after which the state is saved."""


def arguments(tp_size: int, processes: int) -> dict[str, object]:
    if processes == 1:
        return {}
    if tp_size == processes:
        return {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=tp_size)}
    config = ParallelismConfig(tp_size=tp_size, dp_shard_size=processes // tp_size)
    return {"parallelism_config": config, "fsdp_plugin": FullyShardedDataParallelPlugin()}


def train(folder: Path, tp_size: int) -> None:
    """Train, save on the way, and write the losses to `folder`."""
    accelerator = Accelerator(cpu=True, **arguments(tp_size, int(os.environ.get("WORLD_SIZE", "1"))))
    torch.manual_seed(accelerator.process_index)
    model = LlamaForCausalLM(CONFIG)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (STEPS, 4, 16), generator=generator)
    ranks, rank = accelerator.strategy.data_parallel()
    losses = []
    for step, batch in enumerate(tokens):
        mine = batch.chunk(ranks)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([accelerator.reduce(loss.detach(), "mean").item(), float(norm)])
        if step == SAVED:
            accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    with torch.no_grad():
        mine = tokens[SAVED + 1].chunk(ranks)[rank]
        again = accelerator.reduce(model(input_ids=mine, labels=mine).loss, "mean").item()
    names = set(accelerator.get_state_dict(model))
    if accelerator.is_main_process:
        assert names == set(LlamaForCausalLM(CONFIG).state_dict())
        (folder / "split.json").write_text(json.dumps({"losses": losses, "again": again}))
    accelerator.wait_for_everyone()
    accelerator.free_memory(model, optimizer)
