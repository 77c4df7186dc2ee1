"""The checkpoint that the guide's snippets call `my-llama`: a Llama of 23 MB with random weights, and a tokenizer."""

from __future__ import annotations

import argparse
import inspect
import json
import tarfile
import typing
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.small_model import train_tokenizer


def save_small_llama(folder: Path) -> None:
    """Save the model, as one file of float32 weights, and its tokenizer to `folder`."""
    tokenizer = train_tokenizer([inspect.getsource(module) for module in (argparse, inspect, json, tarfile, typing)])
    tokenizer.chat_template = (
        "{% if tools %}({{ tools | length }} tools)\n{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    )
    assert len(tokenizer) == 1024
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
