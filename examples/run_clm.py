"""Fine-tune a causal language model on the docstrings of Python's standard library, byte by byte.

    python examples/run_clm.py --epochs 1
    bigmodel launch --num_processes 2 examples/run_clm.py --epochs 1
    bigmodel launch --config_file config.yaml examples/run_clm.py --model gpt2 --fp16

Nothing is downloaded: without `--model` a small GPT-2 is made, and the text lies in every Python. At the end every run
prints the same line of numbers, so that one process and two can be compared.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
)

from bigmodel import Accelerator, get_logger, set_seed, tqdm

logger = get_logger(__name__, log_level="INFO")
SEPARATOR = 0


class Docstrings(Dataset[dict[str, Tensor]]):
    """Blocks of `block_size` bytes of text; the inputs are also the labels."""

    def __init__(self, text: bytes, block_size: int) -> None:
        usable = len(text) // block_size * block_size
        self.blocks = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, block_size).long()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def standard_library_docstrings(limit: int) -> bytes:
    """Docstrings of the standard library's modules, classes and functions, `limit` bytes of them."""
    found = bytearray()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                found += text.encode() + bytes([SEPARATOR])
            if len(found) >= limit:
                return bytes(found[:limit])
    return bytes(found)


def make_model(name: str | None, block_size: int) -> PreTrainedModel:
    """The model called `name`, or a small GPT-2 over bytes."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    config = GPT2Config(
        vocab_size=256,
        n_positions=block_size,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
    )
    return GPT2LMHeadModel(config)


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[dict[str, Tensor]]) -> float:
    """The mean loss over every sample, once each, whatever the number of processes."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return float(torch.cat(losses).mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A local folder or a name on the Hub.")
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--bytes", type=int, default=400_000, help="Bytes of text to train on.")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    accelerator = Accelerator(
        mixed_precision="fp16" if options.fp16 else None,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
    )
    set_seed(options.seed)
    text = standard_library_docstrings(options.bytes)
    held_out = len(text) // 10
    data = Docstrings(text[held_out:], options.block_size)
    loader = DataLoader(data, batch_size=options.per_device_train_batch_size, shuffle=True)
    test_loader = DataLoader(Docstrings(text[:held_out], options.block_size), batch_size=32)
    model = make_model(options.model, options.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    steps = options.epochs * math.ceil(len(loader) / options.gradient_accumulation_steps)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    logger.info("%d blocks, %d processes, %s", len(data), accelerator.num_processes, accelerator.device)

    seconds = 0.0
    for epoch in range(options.epochs):
        model.train()
        started = time.perf_counter()
        for batch in tqdm(loader, desc=f"epoch {epoch + 1}"):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        seconds += time.perf_counter() - started
        perplexity = math.exp(evaluate(accelerator, model, test_loader))
        accelerator.print(f"epoch {epoch + 1}: perplexity {perplexity:.3f} a byte")
    rate = len(data) * options.epochs / seconds
    accelerator.print(f"processes {accelerator.num_processes}: {rate:.1f} samples/s, {seconds:.1f} s of training")
    if options.output_dir is not None:
        accelerator.save_model(model, options.output_dir)
    accelerator.free_memory(model, optimizer, loader, test_loader, scheduler)
    accelerator.end_training()


if __name__ == "__main__":
    main()
