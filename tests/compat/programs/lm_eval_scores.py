"""Scores and texts that lm-eval has from a model on the accelerator, in RAM and on disk."""

import json

import torch

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=1)
torch.set_num_threads(1)

from lm_eval.api.instance import Instance  # noqa: E402 (after installing)
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.compat.tiny_llama import IN_RAM, ON_DISK, RESIDENT, saved, words  # noqa: E402

CHOICES = [("1 2 3", " 4 5"), ("9 8", " 7"), ("1 2", " 3 4 5 6")]
GREEDY = {"until": ["<end>"], "max_gen_toks": 5, "do_sample": False}


def asked(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def answered(model: torch.nn.Module) -> list[object]:
    evaluated = HFLM(pretrained=model, tokenizer=words(), batch_size=2, max_length=32)
    return [
        evaluated.loglikelihood(asked("loglikelihood", *CHOICES)),
        evaluated.loglikelihood_rolling(asked("loglikelihood_rolling", ("1 2 3 4 5 6",))),
        evaluated.generate_until(asked("generate_until", ("1 2 3", GREEDY))),
    ]


folder = saved()
for name, places in {"accelerator": RESIDENT, "ram": IN_RAM, "disk": ON_DISK}.items():
    found = answered(AutoModelForCausalLM.from_pretrained(folder, device_map=places))
    print("\n" + json.dumps([name, found]), flush=True)
