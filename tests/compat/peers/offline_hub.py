"""What accelerate's scripts fetch from the Hub, made small and laid where the libraries look first: the working folder.

transformers, datasets and evaluate take a folder of the name that is asked for before they ask the Hub, so the scripts
stay word for word.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.compat.programs.example import classifier, pairs, tokenizer

CLASSIFIERS = ("bert-base-cased", "hf-internal-testing/mrpc-bert-base-cased")
UNDECIDED = "undecided"
"""A classifier that takes the rarer class for all rows, by so little that a few steps at 2e-5 change its mind."""
ROWS = {"train": 96, "validation": 45}
"""Pairs of sentences by split; those for validation do not divide among two processes."""

DATASET = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.jsonl
  - split: validation
    path: validation.jsonl
---
"""

METRIC = '''"""Accuracy and F1 of the task MRPC."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    """Takes classes."""

    def _info(self):
        classes = datasets.Value("int64")
        features = datasets.Features({"predictions": classes, "references": classes})
        texts = dict.fromkeys(("description", "citation", "inputs_description"), "")
        return evaluate.MetricInfo(**texts, features=features, format="numpy")

    def _compute(self, predictions, references):
        both = int((predictions & references).sum())
        either = int(predictions.sum() + references.sum())
        return {"accuracy": float((predictions == references).mean()), "f1": 2 * both / max(either, 1)}
'''

DEEPSPEED = {
    f"ds_config_zero{stage}_model_only.json": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    for stage in (2, 3)
}
"""Configurations of accelerate's repository that its source distribution leaves out, by name."""


def lay_out(folder: Path) -> None:
    """Write the models, the data set and its metric into `folder`."""
    torch.manual_seed(0)
    model = classifier()
    for name in CLASSIFIERS:
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([1e-3, 0.0]))
    model.save_pretrained(folder / UNDECIDED)
    tokenizer().save_pretrained(folder / UNDECIDED)
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    (glue / "README.md").write_text(DATASET)
    for seed, (split, count) in enumerate(ROWS.items()):
        columns = pairs(3 * count, seed).columns
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        # Two of three are labelled 1, as in MRPC.
        rows = [row for row in rows if row["label"] or row["idx"] % 2][:count]
        (glue / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    deepspeed = folder / "tests" / "deepspeed"
    deepspeed.mkdir(parents=True)
    for name, content in DEEPSPEED.items():
        (deepspeed / name).write_text(json.dumps(content))
