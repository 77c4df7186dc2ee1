"""Adapters as peft writes them, of random weights, and the model that peft makes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

TARGETS = ["q_proj", "v_proj", "down_proj"]


def write_adapter(model: Any, folder: Path, seed: int = 0, rank: int = 4, **settings: Any) -> Path:
    """Write an adapter of a model that is not changed."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, **{"lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False, **settings})
    get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    return folder


def adapted(model: Any, folder: Path) -> Any:
    """The model with an adapter, as peft computes it."""
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
