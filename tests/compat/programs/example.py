"""Runs one of accelerate's examples with tiny models and data: `example.py LIBRARY SCRIPT PROCESSES ARGUMENTS...`.

Prints each loss as it is differentiated.
"""

from __future__ import annotations

import importlib.machinery
import os
import random
import re
import runpy
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.torchvision_wheel import import_torchvision

WORDS = [
    "red",
    "blue",
    "cat",
    "dog",
    "runs",
    "sleeps",
    "the",
    "a",
    "big",
    "small",
    "house",
    "tree",
    "and",
    "or",
    "sees",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class Rows:
    """What the examples use of `datasets.Dataset`."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = columns
        self.num_rows = len(self)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Any) -> Any:
        return self.columns[index] if isinstance(index, str) else {n: v[index] for n, v in self.columns.items()}

    def map(self, function: Any, remove_columns: Any = (), **_: Any) -> Rows:
        """Return the rows with further columns."""
        columns = {**self.columns, **function(self.columns)}
        return Rows({name: values for name, values in columns.items() if name not in remove_columns})

    def select(self, rows: Any) -> Rows:
        """Return the rows at these positions, as far as there are any."""
        chosen = [row for row in rows if row < len(self)]
        return Rows({name: [values[row] for row in chosen] for name, values in self.columns.items()})

    def filter(self, keeps: Any, input_columns: str) -> Rows:
        """Return the rows whose value in a column is to be kept."""
        return self.select([row for row, value in enumerate(self.columns[input_columns]) if keeps(value)])

    def rename_column(self, old: str, new: str) -> Rows:
        """Return the rows with a column renamed."""
        return Rows({new if name == old else name: values for name, values in self.columns.items()})

    def set_format(self, *_: Any) -> None:
        """Do nothing."""


class Splits(dict[str, Rows]):
    """What the examples use of `datasets.DatasetDict`."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        """The columns of each split."""
        return {name: rows.column_names for name, rows in self.items()}

    def map(self, function: Any, **options: Any) -> Splits:
        """Map all rows."""
        return Splits({name: rows.map(function, **options) for name, rows in self.items()})

    def filter(self, keeps: Any, input_columns: str) -> Splits:
        """Filter all rows."""
        return Splits({name: rows.filter(keeps, input_columns) for name, rows in self.items()})

    def rename_column(self, old: str, new: str) -> Splits:
        """Rename a column."""
        return Splits({name: rows.rename_column(old, new) for name, rows in self.items()})


class Accuracy:
    """What the examples use of `evaluate.load(...)`."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Count a batch."""
        self.seen += (predictions == references).tolist()

    def compute(
        self, predictions: torch.Tensor | None = None, references: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Return the accuracy, with these counted too, and begin anew."""
        if predictions is not None and references is not None:
            self.add_batch(predictions, references)
        seen, self.seen = self.seen, []
        return {"accuracy": sum(seen) / len(seen)}


def pairs(count: int, seed: int) -> Rows:
    """Return pairs of sentences, labelled whether they are equal."""
    choose = random.Random(seed)
    columns: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "label": [], "idx": list(range(count))}
    for _ in range(count):
        one, other = (" ".join(choose.choices(WORDS, k=choose.randint(3, 9))) for _ in range(2))
        same = choose.random() < 0.5
        columns["sentence1"].append(one)
        columns["sentence2"].append(one if same else other)
        columns["label"].append(int(same))
    return Rows(columns)


def data(name: str, *_: Any, **__: Any) -> Splits:
    """Return lines of text, or pairs of sentences."""
    splits = {"train": pairs(70, 0), "validation": pairs(21, 1)}
    if "wikitext" in name:
        splits = {split: Rows({"text": rows["sentence1"]}) for split, rows in splits.items()}
    return Splits(splits)


def tokenizer(*_: Any, **__: Any) -> Any:
    """Return a tokenizer of whole words."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names, eos_token="[SEP]", model_max_length=64)


def classifier(*_: Any, **__: Any) -> Any:
    """Return a tiny BERT."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=21, num_labels=2, **sizes))


def language_model(*_: Any, **__: Any) -> Any:
    """Return a tiny GPT-2."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    )


def stand_in_for_images() -> None:
    """Replace the weights that examples of images fetch from the Hub: the smallest model of timm, with random ones."""
    import timm

    make = timm.create_model
    timm.create_model = lambda _name, num_classes, **_: make("resnet10t", num_classes=num_classes)


def stand_in() -> None:
    """Replace what the examples fetch from the Hub."""
    import_torchvision()  # before transformers imports it
    for name, content in {
        "datasets": {"load_dataset": data},
        "evaluate": {"load": lambda *_, **__: Accuracy()},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content, Dataset=Rows, DatasetDict=Splits)
        sys.modules[name] = module
    for name, made in (
        ("AutoTokenizer", tokenizer),
        ("AutoModelForSequenceClassification", classifier),
        ("AutoModelForCausalLM", language_model),
    ):
        getattr(transformers, name).from_pretrained = staticmethod(made)
    plain = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # One write: ranks share the output.
        os.write(1, f"\nLOSS {os.environ.get('RANK', '0')} {self.item()!r}\n".encode())
        return plain(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def main() -> None:
    """Run the example."""
    library, script, processes, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    stand_in()
    source = Path(script).read_text()
    if "from timm " in source:
        stand_in_for_images()
    source = re.sub(r"\bfrom accelerate\b", f"from {library}", source)
    source = re.sub(r'"num_epochs": \d+', '"num_epochs": 2', source).replace('"batch_size": 16', '"batch_size": 8')
    source = source.replace("2e-5", "2e-3")  # in two epochs something is learnt
    source = source.replace('"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 32')
    if int(processes) > 1:
        source = source.replace("shuffle=True", "shuffle=False")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as changed:
        changed.write(source)
        changed.flush()
        sys.argv = [script, *arguments]
        runpy.run_path(changed.name, run_name="__main__")


if __name__ == "__main__":
    main()
