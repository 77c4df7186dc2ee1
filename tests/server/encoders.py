"""Tiny encoders and cross-encoders, made in memory, and what they compute by themselves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, BertModel

from bigmodel.server import EngineOptions, Settings, create_app
from tests.server.live import MODEL
from tests.server.tiny import EOS, fresh_tokenizer

WIDTH = 64
LONGEST = 128


@lru_cache(maxsize=1)
def pair_tokenizer() -> Any:
    """The tokenizer of the tiny model, which ends each text with a token and tells the two of a pair apart."""
    tokenizer = fresh_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, tokenizer.eos_token_id)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def encoder(kind: Any = BertModel, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny BERT."""
    config = BertConfig(
        **{
            "vocab_size": len(pair_tokenizer()),
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": LONGEST,
            "initializer_range": 0.2,
            "num_labels": 1,
            **changes,
        }
    )
    torch.manual_seed(seed)
    return kind(config).eval()


def cross_encoder(**changes: Any) -> Any:
    """A tiny BERT that scores pairs."""
    return encoder(BertForSequenceClassification, **changes)


def encoder_app(model: Any, **settings: Any) -> Any:
    """The server over such a model."""
    options = EngineOptions(kv_bytes=1 << 20, max_sequences=4)
    return create_app(model, pair_tokenizer(), settings=Settings(MODEL, engine=options, **settings))


def states(model: Any, tokens: list[int]) -> torch.Tensor:
    """States [tokens, width] of a text, from a forward of its own."""
    base = getattr(model, "model", model)
    with torch.no_grad():
        found: torch.Tensor = base(input_ids=torch.tensor([tokens])).last_hidden_state[0].float()
    return found
