"""Train LoRA adapters of a model that the accelerator cannot hold: its weights stay in memory or on disk.

    python examples/adapt.py
    python examples/adapt.py --model path/or/hub-id

The base model stays in its files and is streamed to the accelerator block by block, in forward and in backward; only
the adapters change. Without `--model` a small Llama with random weights is saved first, and on a machine without an
accelerator a virtual one stands in, too small for it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel import Accelerator, format_size, from_pretrained, set_seed
from bigmodel.devices import accelerators, max_memory_allocated, reset_peak_memory, virtual


def small_llama(folder: Path) -> Path:
    """Save a Llama with random weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A local folder or a name on the Hub.")
    parser.add_argument("--virtual_memory", default="4MiB", help="What a virtual accelerator holds.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output_dir", type=Path)
    options = parser.parse_args()
    set_seed(0)
    if not accelerators():
        virtual.enable(count=1, capacity=options.virtual_memory)
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model or small_llama(Path(scratch))
        train(from_pretrained(source, {"": "disk"}, main_device=0), options)


def train(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Add adapters to a dispatched model and train them on one text."""
    accelerator = Accelerator()
    base = sum(p.nbytes for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    text = torch.frombuffer(bytearray(b"the adapters learn this line by heart. " * 40), dtype=torch.uint8).long()
    rows = text[: len(text) // 32 * 32].view(-1, 32)
    adapted, optimizer, loader = accelerator.prepare(adapted, optimizer, DataLoader(rows, batch_size=2, shuffle=True))
    reset_peak_memory(0)
    step = 0
    while step < options.steps:
        for ids in loader:
            loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (1, options.steps):
                accelerator.print(f"step {step}: loss {loss.item():.3f}")
            if step == options.steps:
                break
    peak = format_size(max_memory_allocated(0))
    accelerator.print(f"the base takes {format_size(base)}; the accelerator held {peak} at most")
    if options.output_dir is not None:
        accelerator.unwrap_model(adapted).save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
