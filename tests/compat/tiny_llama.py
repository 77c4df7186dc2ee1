"""A tiny Llama in a folder and a tokenizer of numbers, for programs that are run under the stand-in."""

from __future__ import annotations

import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RESIDENT = {"": 0}
IN_RAM = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers": "cpu", "model.norm": 0, "lm_head": 0}
ON_DISK = {**IN_RAM, "model.embed_tokens": "disk", "model.layers": "disk"}


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the numbers 0 to 61, separated by spaces."""
    numbers = {str(number): number for number in range(62)}
    tokenizer = Tokenizer(models.WordLevel({**numbers, "<end>": 62, "<pad>": 63}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def saved() -> str:
    """Return a folder with a model of two layers."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
