"""The training examples run, on one process and on two, and agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.train.multiprocess import run_script

from .starting import ROOT, launched

EXAMPLES = ROOT / "examples"
MODULES = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    *(["deepspeed"] if importlib.util.find_spec("accelerate") and importlib.util.find_spec("deepspeed") else []),
)
"""What the scripts import, beside PyTorch: to save a model, transformers imports DeepSpeed where accelerate is."""


def output(name: str, processes: int, *arguments: object) -> str:
    if processes == 1:
        return run_script([EXAMPLES / name, *arguments], modules=MODULES, HF_HOME="/nonexistent")
    flags = ["--cpu", "--num_processes", processes]
    done = launched(*flags, EXAMPLES / name, *arguments, fork_ranks=True, modules=MODULES)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_language_modelling_learns_the_same_on_one_process_and_two(tmp_path: Path) -> None:
    found = []
    for processes, batch_size in ((1, 16), (2, 8)):
        flags = ["--bytes", 8_000, "--block_size", 32, "--per_device_train_batch_size", batch_size]
        shown = output("run_clm.py", processes, *flags, "--output_dir", tmp_path / str(processes))
        assert f"processes {processes}: " in shown
        assert (tmp_path / str(processes) / "model.safetensors").is_file()
        found.append(float(re.search(r"perplexity ([\d.]+) a byte", shown)[1]))
    assert found[0] < 100
    assert found[1] == pytest.approx(found[0], rel=0.1)


@pytest.mark.slow
def test_the_classifier_learns_and_saves_its_state(tmp_path: Path) -> None:
    for processes in (1, 2):
        flags = ["--epochs", 2, "--samples", 2000, "--output_dir", tmp_path / "state"]
        shown = output("classify.py", processes, *flags)
        accuracy = [float(value) for value in re.findall(r"val/acc ([\d.]+)", shown)]
        assert accuracy[1] > 0.5
        assert (tmp_path / "state" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_tracked_run_leaves_events_and_a_policy(tmp_path: Path) -> None:
    shown = output("track.py", 2, "--project_dir", tmp_path, "--steps", 40)
    assert "loss 0.0" in shown
    assert (tmp_path / "policy.pt").is_file()
    assert list((tmp_path / "regression").glob("events*"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_a_model_that_does_not_fit_are_trained(tmp_path: Path) -> None:
    shown = output("adapt.py", 1, "--steps", 3, "--output_dir", tmp_path)
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", shown))
    assert last < first
    base, peak = (float(size) for size in re.findall(r"([\d.]+) MiB", shown))
    if not torch.cuda.is_available():  # else cuBLAS's workspaces alone take more than the model
        assert peak < base / 2
    assert (tmp_path / "adapter_model.safetensors").is_file()


TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.arange(96).remainder(7).view(12, 8)]
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
flags = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=20, learning_rate=0.01)
arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **flags)
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=rows, eval_dataset=rows[:5])
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
if arguments.process_index == 0:
    print(arguments.world_size, arguments.parallel_mode.value, after < before / 2)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_the_trainer_of_transformers_is_launched(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINER)
    done = launched("--cpu", "--num_processes", 2, script, tmp_path, fork_ranks=True, modules=MODULES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "2 distributed True"
