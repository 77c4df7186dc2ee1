"""Trains, resumes, predicts and loads from disk, under whichever accelerate there is: the library or the stand-in."""

import importlib.metadata
import json
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
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

torch.set_num_threads(1)
IDS = torch.arange(8)
DATA = [{"input_ids": IDS + i, "labels": IDS + i} for i in range(16)]
SMALL = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
T5 = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0)
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 2,
    "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def trainer(folder: str) -> Trainer:
    set_seed(0)
    return Trainer(LlamaForCausalLM(SMALL), TrainingArguments(folder, **SETTINGS), train_dataset=DATA)


def seq2seq_trainer(folder: str) -> Seq2SeqTrainer:
    set_seed(0)
    arguments = Seq2SeqTrainingArguments(folder, predict_with_generate=True, generation_max_length=6, **SETTINGS)
    return Seq2SeqTrainer(T5ForConditionalGeneration(T5), arguments, train_dataset=DATA, eval_dataset=DATA[:4])


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def main(root: str) -> None:
    for make in (trainer, seq2seq_trainer):
        folder = f"{root}/{make.__name__}"
        first = make(folder)
        first.train()
        say(f"losses of {make.__name__}", losses(first))
        again = make(folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        say(f"{make.__name__} resumed", losses(again))
        first.save_model(folder)
    say("predictions", first.predict(DATA[:4]).predictions.tolist())
    say("evaluation", first.evaluate()["eval_loss"])
    say("uneven evaluation", first.evaluate(DATA[:11])["eval_loss"])
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    folder = f"{root}/{trainer.__name__}"
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=f"{root}/offload")
    say("tokens", loaded.generate(IDS[None], max_new_tokens=6, do_sample=False).tolist())
    say("distribution", importlib.metadata.version("accelerate"))


with tempfile.TemporaryDirectory() as root:
    main(root)
