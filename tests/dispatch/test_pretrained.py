import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from bigmodel.checkpoint import mapped_region
from bigmodel.devices import max_memory_allocated
from bigmodel.dispatch import from_pretrained, get_plan, undispatch
from bigmodel.errors import BudgetError, CheckpointError, CheckpointNotFoundError, PlanError

from ..accelerators import at, exact
from ..profile.hub_server import HubServer
from .models import llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


TOKENS = torch.arange(8).view(2, 4)


def test_on_the_host_the_model_is_the_one_transformers_loads(folder: Path) -> None:
    model = from_pretrained(folder, context_length=16)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert not model.training


def test_weights_that_do_not_fit_stay_in_the_checkpoint(folder: Path) -> None:
    weights = sum(p.nbytes for p in llama().parameters())
    model = from_pretrained(folder, max_memory={"cpu": weights}, context_length=16)
    plan = get_plan(model)
    assert plan is not None
    assert model.hf_device_map == plan.device_map
    assert plan.devices["disk"].weights
    assert plan.devices["cpu"].weights
    assert plan.devices["cpu"].slots
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)


def test_host_weights_are_mapped_from_the_checkpoint(folder: Path) -> None:
    weights = sum(p.nbytes for p in llama().parameters())
    model = from_pretrained(folder, max_memory={"cpu": weights}, context_length=16)
    assert "cpu" in model.hf_device_map.values()
    assert all(mapped_region(parameter) is not None for parameter in model.parameters())


@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize("share", [0.7, 0.9, 1.5, 3.0])
@exact
def test_an_accelerators_budget_holds_and_predicted_weights_are_exact(folder: Path, share: float) -> None:
    weights = sum(p.nbytes for p in llama().parameters())
    budget = int(share * weights)
    model = from_pretrained(folder, max_memory={0: budget, "cpu": weights // 4}, context_length=8, batch_size=2)
    plan = get_plan(model)
    assert plan is not None
    for key, device in plan.devices.items():
        name = at(key) if isinstance(key, int) else key
        held = [p for p in model.parameters() if ("disk" if mapped_region(p) else str(p.device)) == name]
        assert sum(p.nbytes for p in held) == device.weights
    resident = set(model.hf_device_map.values()) == {0}
    with torch.no_grad():
        output = model(TOKENS.to(at(0)) if resident else TOKENS).logits
    assert max_memory_allocated(0) <= budget
    with torch.no_grad():
        expected = llama().to(at(0))(TOKENS.to(at(0))).logits.cpu()
    torch.testing.assert_close(output.cpu(), expected)


def test_a_plan_that_cannot_be_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(BudgetError, match="cpu"):
        from_pretrained(folder, max_memory={"cpu": 10})


def test_a_dtype_is_cast_to(folder: Path) -> None:
    model = from_pretrained(folder, dtype="bfloat16", device_map="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(TOKENS).logits.dtype == torch.bfloat16
    with pytest.raises(PlanError, match="float99"):
        from_pretrained(folder, dtype="float99")


@pytest.mark.usefixtures("every_accelerator")
def test_other_architectures_load_and_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32)),
        BertForMaskedLM(
            BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=32)
        ),
        T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32)),
    ]
    for number, plain in enumerate(models):
        plain.eval().save_pretrained(tmp_path / str(number))
        inputs = {"input_ids": TOKENS}
        if plain.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = TOKENS
        with torch.no_grad():
            there = plain.to(at(0))(**{name: value.to(at(0)) for name, value in inputs.items()}).logits.cpu()
            model = from_pretrained(tmp_path / str(number), device_map={"": "disk"}, main_device=0)
            assert type(model) is type(plain)
            assert torch.equal(model(**inputs).logits, there), type(plain).__name__
        undispatch(model)


def test_a_model_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "hub" / "owner" / "tiny", max_shard_size="20KB")
    with HubServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        model = from_pretrained("owner/tiny", cache_dir=tmp_path / "cache")
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)


def test_a_path_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        from_pretrained(tmp_path / "nothing")
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "unheard-of"}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=r"config\.json|quantised"):
            from_pretrained(tmp_path)
