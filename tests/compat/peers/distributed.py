"""What transformers' cases of the Trainer on two processes need, where these are on the CPU and nothing is fetched.

The cases start scripts by ``accelerate launch`` and ``torchrun``: executables of these names run the same scripts under
the stand-in, over gloo. The model that the scripts load is made small and laid where the libraries look first.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

FILES = tuple(f"tests/trainer/distributed/test_trainer_distributed_{kind}.py" for kind in ("ddp", "fsdp"))
SCRIPT = Path("tests", "trainer", "distributed", "scripts", "train.py")
MODEL = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"

COMMANDS = {
    # The Trainer refuses bfloat16 where there is no GPU, unless it is told to use the CPU.
    "accelerate": """
        shift
        case "$*" in *train.py*) set -- "$@" --use_cpu ;; esac
        exec {python} -m bigmodel launch --cpu "$@"
        """,
    "torchrun": """
        options=""
        while [ "${{1#--}}" != "$1" ]; do options="$options $1"; shift; done
        exec {python} -m torch.distributed.run $options -m bigmodel run "$@"
        """,
}


def lay_out(folder: Path) -> dict[str, str]:
    """Write the commands and the model into `folder`, which has the tests; return the variables to run them with."""
    commands = folder / "commands"
    commands.mkdir()
    for name, text in COMMANDS.items():
        path = commands / name
        path.write_text(f"#!/bin/sh\n{text.format(python=sys.executable)}")
        path.chmod(0o755)
    save_model(folder / MODEL, (folder / SCRIPT).read_text())
    return {
        "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
        "TRANSFORMERS_TEST_DEVICE": "cpu",
        "RUN_SLOW": "1",
        "BIGMODEL_COMPAT": "1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def save_model(folder: Path, text: str) -> None:
    """Write a tiny Qwen2 and a tokenizer of the words in `text`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    words = sorted(set(re.findall(r"\w+|[^\w\s]", text)))
    vocabulary = {word: number for number, word in enumerate(["<end>", "<pad>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    config = Qwen2Config(
        hidden_size=8, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=len(vocabulary), max_position_embeddings=512,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
