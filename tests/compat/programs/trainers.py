"""Trains one small model by transformers' Trainer on two processes: plainly, sharded (FSDP), and by DeepSpeed.

Arguments: a folder that both share, and the kinds; all by default. Prints the losses of each, and whether training
resumed in the middle repeats them.
"""

import json
import os
import sys

import numpy as np
import torch

torch.set_num_threads(1)

import accelerate  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

IDS = torch.arange(8)
DATA = [{"input_ids": IDS + i, "labels": IDS + i} for i in range(16)]
CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
T5 = T5Config(
    d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0
)
SHARDED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "seq2seq": {"predict_with_generate": True, "generation_max_length": 6},
    "fsdp": {"fsdp": True, "fsdp_config": {**SHARDED, "version": 2}},
    "fsdp 1": {"fsdp": "full_shard auto_wrap", "fsdp_config": {**SHARDED, "version": 1}},
    "fsdp bf16": {"fsdp": True, "fsdp_config": {**SHARDED, "version": 2}, "bf16": True},
    "deepspeed 2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "deepspeed 3": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}},
}


def say(question: str, answer: object) -> None:
    line = json.dumps([f"{question} {os.environ['RANK']}", answer])
    os.write(1, f"\n{line}\n".encode())  # at once: both processes write to one pipe


def trainer(folder: str, arguments: dict[str, object]) -> Trainer:
    set_seed(0)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    generates = "predict_with_generate" in arguments
    common = (Seq2SeqTrainingArguments if generates else TrainingArguments)(
        folder, per_device_train_batch_size=2, max_steps=4, save_steps=2, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-2, **arguments,
    )  # fmt: skip
    if generates:
        return Seq2SeqTrainer(T5ForConditionalGeneration(T5), common, train_dataset=DATA, eval_dataset=DATA[:5])
    return Trainer(LlamaForCausalLM(CONFIG), common, train_dataset=DATA)


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def same(found: list[float], expected: list[float]) -> bool:
    # Not to the last bit: loaded weights are aligned otherwise, and on some processors products then round otherwise.
    return len(found) == len(expected) and np.allclose(found, expected, rtol=1e-6, atol=0)


def main(root: str, kinds: list[str]) -> None:
    say("version", accelerate.__version__)
    say("run under the stand-in", "bigmodel.compat.run" in sys.modules)
    for kind in kinds:
        folder = f"{root}/{kind}"
        first = trainer(folder, KINDS[kind])
        first.train()
        say(f"{kind}: losses", losses(first))
        again = trainer(folder, KINDS[kind])
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        say(f"{kind}: resumed", same(losses(again), losses(first)))
        if kind == "seq2seq":
            predicted = first.predict(DATA[:5])
            say(f"{kind}: predicted", [predicted.predictions.tolist(), predicted.metrics["test_loss"]])
        first.save_model(f"{folder}/saved")
        PartialState().wait_for_everyone()
        if kind not in ("seq2seq", "deepspeed 3"):  # shards are saved there
            saved = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
            say(f"{kind}: saved", saved.num_parameters() == LlamaForCausalLM(CONFIG).num_parameters())


main(sys.argv[1], sys.argv[2:] or list(KINDS))
