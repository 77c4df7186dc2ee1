"""Loads a small Llama through transformers under the stand-in, runs it in pipelines, and trains one by a Trainer."""

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import torch

import bigmodel.compat
from bigmodel.checkpoint import mapped_region
from bigmodel.devices import virtual
from bigmodel.devices.memory import max_memory_allocated
from bigmodel.errors import DispatchError
from bigmodel.limits import VECTOR_BYTES

bigmodel.compat.install()
virtual.enable(count=1)
torch.set_num_threads(1)

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402 (after installing)
from torchao.quantization import Int8WeightOnlyConfig  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
CONFIG = LlamaConfig(num_hidden_layers=6, vocab_size=128, max_position_embeddings=128, **SIZES)
IDS = torch.arange(8)[None]


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def load(folder: str, **arguments: object) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


@torch.no_grad()
def generated(model: LlamaForCausalLM) -> list[int]:
    return model.generate(IDS, max_new_tokens=3, do_sample=False)[0].tolist()


def loading(folder: str, whole: LlamaForCausalLM) -> None:
    os.environ["BIGMODEL_CONTEXT_LENGTH"] = "64"
    model = load(folder, device_map="auto", max_memory={0: "360KB", "cpu": "1GB"})
    host = [p for p in model.parameters() if p.device.type == "cpu"]
    say("places", sorted({str(device) for device in model.hf_device_map.values()}))
    say("host weights are mapped", bool(host) and all(mapped_region(p) is not None for p in host))
    say("peak", max_memory_allocated(0) <= 360_000)
    say("tokens", generated(model) == generated(whole))
    say("execution device", str(model._hf_hook.execution_device))
    say("plan", next(line for line in bigmodel.compat.report().splitlines() if "LlamaForCausalLM:" in line))

    places = {"model.embed_tokens": 0, "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": 0, "lm_head": 0}
    model = load(folder, device_map=places, dtype=torch.bfloat16)
    say("given map", model.hf_device_map == places)
    say("disk keeps its dtype", str(model.model.layers[0].mlp.up_proj.weight.dtype))
    say("cast where it runs", str(model(IDS).logits.dtype))
    say("tokens in bfloat16", generated(model) == generated(load(folder, dtype=torch.bfloat16)))


def on_the_host(folder: str) -> None:
    """Load a file whose tensors are misaligned for the host, which computes with them: by transformers alone, by maps
    without an accelerator, and by a map that has the host's part in memory."""
    misalign(f"{folder}/model.safetensors")
    expected = load(folder)(IDS).logits
    for place in ("disk", "cpu"):
        model = load(folder, device_map={"model": place, "lm_head": "disk"}, offload_folder=folder)
        weights = [p for name, p in model.named_parameters() if place == "disk" or "lm_head" in name]
        say(f"{place}: misaligned", all(p.data_ptr() % VECTOR_BYTES for p in weights))
        say(f"{place}: views of the file", all(mapped_region(p) is not None for p in weights))
        say(f"{place}: logits", torch.equal(model(IDS).logits, expected))
        say(f"{place}: views after a forward", all(mapped_region(p) is not None for p in weights))


def misalign(path: str) -> None:
    """Lengthen the header of a safetensors file so that its tensors begin at odd multiples of 8 bytes."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    header += b" " * (-len(header) % VECTOR_BYTES)  # behind its length, a number of 8 bytes
    Path(path).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def pipelines(folder: str, whole: LlamaForCausalLM) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    text = " ".join(f"w{i}" for i in IDS[0].tolist())

    def tokens(**arguments: object) -> list[int]:
        made = pipeline("text-generation", model=folder, **arguments)
        found = made([text, text], batch_size=2, max_new_tokens=3, do_sample=False, return_tensors=True)
        one, other = (each[0]["generated_token_ids"] for each in found)
        assert one == other
        return one

    budgets = {"max_memory": {0: "360KB", "cpu": "1GB"}}
    say("pipeline", tokens(device_map="auto", model_kwargs=budgets) == generated(whole))
    places = {"model": "disk", "lm_head": 0}
    say("pipeline from disk", tokens(device_map=places) == generated(whole))


def quantised(folder: str) -> None:
    """Have transformers quantise the model while it is loaded, planned by transformers and by a map."""
    configs: dict[str, object] = {"torchao": TorchAoConfig(Int8WeightOnlyConfig())}
    if importlib.util.find_spec("bitsandbytes"):
        configs["bitsandbytes"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    for name, config in configs.items():
        expected = load(folder, quantization_config=config)(IDS).logits
        for device_map in ("auto", {"": "cpu"}):
            model = load(folder, quantization_config=config, device_map=device_map, max_memory={"cpu": "1GB"})
            say(f"{name}, {device_map}", torch.equal(model(IDS).logits, expected))
    try:
        places = {"model": 0, "model.layers.3": "disk", "lm_head": 0}
        load(folder, quantization_config=configs["torchao"], device_map=places, offload_folder=folder)
    except DispatchError as error:
        say("quantised and streamed", str(error))


def training(folder: str) -> None:
    data = [{"input_ids": IDS[0] + i, "labels": IDS[0] + i} for i in range(16)]

    def trainer() -> Trainer:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=128, max_position_embeddings=128, **SIZES))
        return Trainer(model, arguments, train_dataset=data)

    first = trainer()
    first.train()
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    weights = zip(first.model.parameters(), again.model.parameters())
    say("losses", [entry["loss"] for entry in first.state.log_history if "loss" in entry])
    say("resumed", all(torch.equal(one, other) for one, other in weights))


def main() -> None:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(CONFIG).eval()
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        loading(folder, whole)
        pipelines(folder, whole)
        quantised(folder)
        on_the_host(folder)
    with tempfile.TemporaryDirectory() as folder:
        training(folder)
    say("report", bigmodel.compat.report())


main()
