"""Scores and texts that lm-eval has from a model on an accelerator, in RAM and on disk, and from models that it loads
itself, by its own arguments: on one of two accelerators, and on both."""

import gc
import json
from typing import Any

import torch

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=2)
torch.set_num_threads(1)

from lm_eval.api.instance import Instance  # noqa: E402 (after installing)
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.compat.tiny_llama import IN_RAM, ON_DISK, RESIDENT, saved, words  # noqa: E402

CHOICES = [("1 2 3", " 4 5"), ("9 8", " 7"), ("1 2", " 3 4 5 6")]
GREEDY = {"until": ["<end>"], "max_gen_toks": 5, "do_sample": False}


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def asked(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def answered(evaluated: HFLM) -> list[object]:
    return [
        evaluated.loglikelihood(asked("loglikelihood", *CHOICES)),
        evaluated.loglikelihood_rolling(asked("loglikelihood_rolling", ("1 2 3 4 5 6",))),
        evaluated.generate_until(asked("generate_until", ("1 2 3", GREEDY))),
    ]


def given(model: torch.nn.Module) -> HFLM:
    return HFLM(pretrained=model, tokenizer=words(), batch_size=2, max_length=32)


def loaded(device: str) -> HFLM:
    """Return what `--model hf --device DEVICE` makes."""
    arguments = f"pretrained={folder},parallelize=True,device_map=auto,dtype=float32,max_length=32"
    others: dict[str, Any] = {"batch_size": 2, "device": device}
    return HFLM.create_from_arg_string(arguments, others)


folder = saved()
words().save_pretrained(folder)
for name, places in {"accelerator": RESIDENT, "ram": IN_RAM, "disk": ON_DISK}.items():
    say(name, answered(given(AutoModelForCausalLM.from_pretrained(folder, device_map=places))))
evaluated = loaded("virtual:0")
say("loaded on one", [str(evaluated.model.device), answered(evaluated)])
say("reported", next(line for line in bigmodel.compat.report().splitlines() if "nothing is attached" in line))
del evaluated
gc.collect()
for index in (0, 1):
    virtual.configure(index, capacity=300_000)
evaluated = loaded("cpu")
say("loaded on both", [sorted(set(evaluated.model.hf_device_map.values())), answered(evaluated)])
