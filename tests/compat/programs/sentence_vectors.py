"""Encodes and trains by sentence-transformers, under whichever accelerate there is; offloaded under the stand-in."""

import json
import sys
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.readers import InputExample
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel

from tests.compat.tiny_llama import words

torch.set_num_threads(1)
TEXTS = ["1 2 3", "4 5 6 7", "8 9", "10"]
PAIRS = [InputExample(texts=[f"{i} {i + 1}", f"{i + 2} {i}"], label=float(i % 2)) for i in range(16)]


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def saved(folder: str) -> str:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer = words()
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    return folder


def vectors(model: SentenceTransformer) -> list[list[float]]:
    return [list(map(float, row)) for row in model.encode(TEXTS)]


def loaded(folder: str) -> SentenceTransformer:
    torch.manual_seed(1)
    return SentenceTransformer(folder, device="cpu")


def main(folder: str) -> None:
    saved(folder)
    on_disk = {"device_map": {"embeddings": "disk", "encoder": "disk", "pooler": "cpu"}, "offload_folder": folder}
    say("encoded", vectors(loaded(folder)))
    say("encoded from disk", vectors(SentenceTransformer(folder, model_kwargs=on_disk)))
    fitted = loaded(folder)
    batches = DataLoader(PAIRS, batch_size=4, shuffle=False)
    loss = losses.CosineSimilarityLoss(fitted)
    fitted.fit([(batches, loss)], epochs=1, warmup_steps=1, show_progress_bar=False)
    say("fitted", vectors(fitted))
    trained = loaded(folder)
    columns = {"one": [each.texts[0] for each in PAIRS], "other": [each.texts[1] for each in PAIRS]}
    trainer = SentenceTransformerTrainer(
        trained,
        SentenceTransformerTrainingArguments(
            folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({**columns, "label": [each.label for each in PAIRS]}),
        loss=losses.CosineSimilarityLoss(trained),
    )  # fmt: skip
    trainer.train()
    say("losses", [line["loss"] for line in trainer.state.log_history if "loss" in line])
    say("trained", vectors(trained))
    if "bigmodel.compat" in sys.modules:
        from bigmodel.devices import virtual

        virtual.enable(count=1)
        offloaded = (
            {"device_map": {"": 0}},
            {"device_map": {"embeddings": 0, "encoder": "cpu", "pooler": 0}},
            {"device_map": {"embeddings": 0, "encoder": "disk", "pooler": 0}, "offload_folder": folder},
            {"device_map": "auto"},
        )
        say("offloaded", [vectors(SentenceTransformer(folder, model_kwargs=each)) for each in offloaded])


with tempfile.TemporaryDirectory() as made:
    main(made)
