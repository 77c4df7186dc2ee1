"""Loads, merges, saves, deletes and trains adapters of peft on a model that transformers has loaded offloaded."""

import json
import tempfile
from collections.abc import Callable

import torch

import bigmodel.compat
from bigmodel.devices import virtual
from bigmodel.dispatch.attach.mark import is_dispatched

bigmodel.compat.install()
virtual.enable(count=1)
torch.set_num_threads(1)

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402 (after installing)
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

IDS = torch.arange(8)[None]
PLACES = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    "model.layers.0": 0,
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": 0,
    "lm_head": 0,
}
CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
MEMORY = {0: "80KB", "cpu": "1MB"}
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


@torch.no_grad()
def logits(model: Callable[..., object]) -> torch.Tensor:
    return model(IDS).logits.cpu()


def losses(model: PeftModel, config: LoraConfig = LORA) -> list[float]:
    """Train new adapters by a plain loop."""
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = IDS.to(model.device)
    found = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(base: str, adapter: str, saved: str) -> None:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(CONFIG).eval()
    whole.save_pretrained(base)
    reference = get_peft_model(whole, LORA).eval()
    reference.save_pretrained(adapter)
    expected = logits(reference)
    with reference.disable_adapter():
        plain = logits(reference)

    def load(places: dict[str, object]) -> LlamaForCausalLM:
        return AutoModelForCausalLM.from_pretrained(base, device_map=dict(places))

    def loaded() -> PeftModel:
        return PeftModel.from_pretrained(load(PLACES), adapter, max_memory=MEMORY).eval()

    def same(model: Callable[..., object], values: torch.Tensor = expected) -> bool:
        return bool(torch.allclose(logits(model), values, atol=1e-5))

    model = loaded()
    say("loaded", same(model))
    say("dispatched", set(model.hf_device_map.values()) == {0, "cpu"} and is_dispatched(model))
    with model.disable_adapter():
        say("disabled", same(model, plain))
    model.save_pretrained(saved)
    one, other = (load_file(f"{folder}/adapter_model.safetensors") for folder in (saved, adapter))
    say("saved", one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one))
    model.merge_adapter()
    say("merged", same(model))
    model.unmerge_adapter()
    say("merged and unmerged", same(model))
    say("merged for good", same(model.merge_and_unload()))
    model = loaded()
    model.load_adapter(adapter, "second")
    model.delete_adapter("default")
    model.set_adapter("second")
    say("first of two deleted", same(model))
    say("merged safely", same(loaded().merge_and_unload(safe_merge=True)))
    dora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    both = []
    for places in (PLACES, {"": 0}):
        torch.manual_seed(2)
        decomposed = get_peft_model(load(places), dora).eval()
        with torch.no_grad():
            both.append(decomposed(IDS.to(decomposed.device)).logits.cpu())
    say("weights decomposed", torch.allclose(*both, atol=1e-5))
    found, expected_losses = losses(load(PLACES)), losses(load({"": 0}))
    say("trained without prepare", torch.allclose(torch.tensor(found), torch.tensor(expected_losses)))
    with_copies = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm", "lm_head"])
    on_disk = PLACES | {"model.norm": "disk", "lm_head": "cpu"}
    found, expected_losses = losses(load(on_disk), with_copies), losses(load({"": 0}), with_copies)
    say("copies of modules trained", torch.allclose(torch.tensor(found), torch.tensor(expected_losses)))
    model = load(PLACES)
    model.load_adapter(adapter)
    say("loaded by transformers", same(model))


with tempfile.TemporaryDirectory() as root:
    main(f"{root}/base", f"{root}/adapter", f"{root}/saved")
