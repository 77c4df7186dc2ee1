"""A small Llama and the text it learns from: the docstrings of Python's standard library, found on every machine."""

from __future__ import annotations

import ast
import math
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import bigmodel

END = "<end>"


@dataclass(frozen=True)
class Text:
    """Docstrings to learn from, and others to be judged by."""

    training: list[str]
    held_out: list[str]


def read_text(held_out: float = 0.05) -> Text:
    """Return the docstrings of the standard library, shuffled the same way each time and split in two."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # some files of the library are syntax that its own tests reject
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(ast.get_docstring(node) or "")
    texts = sorted(text for text in found if len(text) > 40)
    random.Random(0).shuffle(texts)
    cut = int(len(texts) * held_out)
    return Text(training=texts[cut:], held_out=texts[:cut])


def train_tokenizer(texts: list[str], words: int = 1024) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `words` tokens trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def build_model(tokenizer: PreTrainedTokenizerFast, context: int) -> PreTrainedModel:
    """Return a Llama of about one million parameters with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


class Windows(Dataset[torch.Tensor]):
    """All texts one after another, cut into windows of `context` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], context: int) -> None:
        tokens = [token for ids in tokenizer(texts).input_ids for token in [*ids, tokenizer.eos_token_id]]
        usable = len(tokens) // context * context
        self.windows = torch.tensor(tokens[:usable]).view(-1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]


def train(
    accelerator: bigmodel.Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    context: int,
    steps: int = 600,
) -> PreTrainedModel:
    """Train `model` on `texts` for `steps` steps and return it."""
    loader = DataLoader(Windows(tokenizer, texts, context), batch_size=8, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.05, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=steps, pct_start=0.1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    done = 0
    while done < steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done % 100 == 0 or done == steps:
                accelerator.print(f"step {done} of {steps}: loss {loss.item():.2f}")
            if done == steps:
                break
    return accelerator.unwrap_model(model).eval()


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], context: int) -> float:
    """Return the perplexity of `model` on `texts`: exp of the mean loss per token."""
    model.eval()
    losses = [
        model(input_ids=batch, labels=batch).loss.item()
        for batch in DataLoader(Windows(tokenizer, texts, context), batch_size=16)
    ]
    return math.exp(sum(losses) / len(losses))
