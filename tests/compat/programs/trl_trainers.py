"""Trains a model that is offloaded in part, and one that is on the accelerator, by trl's trainers."""

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=1)
os.environ["ACCELERATE_TORCH_DEVICE"] = "virtual:0"  # transformers asks for it where there is no CUDA
torch.set_num_threads(1)

from datasets import IterableDataset  # noqa: E402 (after installing)
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from tests.compat.tiny_llama import IN_RAM, RESIDENT, saved, words  # noqa: E402

TEXTS = [{"text": "1 2 3 4 5 6"}, {"text": "7 8 9 10"}] * 8
PAIRS = [
    {"prompt": "1 2 3", "chosen": " 6 7", "rejected": " 10 11"},
    {"prompt": "4 5", "chosen": " 8 9", "rejected": " 12 13"},
] * 8
OPTIONS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def rows(which: str) -> Iterator[dict[str, str]]:
    yield from TEXTS if which == "texts" else PAIRS


def losses(model: PreTrainedModel, preferences: bool, adapters: bool, **options: Any) -> list[float]:
    """Train a model by its default optimizer; return the losses."""
    trainer, config = (DPOTrainer, DPOConfig) if preferences else (SFTTrainer, SFTConfig)
    which = {"which": "pairs" if preferences else "texts"}
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    training = trainer(
        model,
        args=config(tempfile.mkdtemp(), **OPTIONS),
        train_dataset=IterableDataset.from_generator(rows, gen_kwargs=which),
        processing_class=words(),
        peft_config=lora if adapters else None,
        **options,
    )
    training.train()
    return [line["loss"] for line in training.state.log_history if "loss" in line]


def loaded(places: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, device_map=places)


FOLDER = saved()
for preferences in (False, True):
    for adapters in (False, True):
        name = f"{'preferences' if preferences else 'texts'}{' with adapters' if adapters else ''}"
        say(name, [losses(loaded(places), preferences, adapters) for places in (RESIDENT, IN_RAM)])
model = loaded(IN_RAM)
say("a copy as reference", losses(model, True, False, ref_model=copy.deepcopy(model)))
