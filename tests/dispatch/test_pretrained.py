import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from bigmodel.checkpoint import mapped_region
from bigmodel.devices import max_memory_allocated
from bigmodel.dispatch import dispatch_model, from_pretrained, get_plan, undispatch
from bigmodel.errors import BudgetError, CheckpointError, CheckpointNotFoundError, PlanError

from ..accelerators import at, exact
from ..examples import alike
from ..profile.hub_server import HubServer
from .models import llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


TOKENS = torch.arange(8).view(2, 4)


@pytest.mark.slow
def test_on_the_host_the_model_is_the_one_transformers_loads(folder: Path) -> None:
    model = from_pretrained(folder, max_memory={"cpu": "1GiB"}, context_length=16)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert not model.training


@pytest.mark.slow
@alike("safe", [True, False], first=1)
def test_a_config_without_a_dtype_gives_the_model_that_of_the_checkpoint(tmp_path: Path, safe: bool) -> None:
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    if not safe:
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": None}))
    found = from_pretrained(tmp_path, max_memory={"cpu": "1GiB"}, context_length=16)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}


def test_a_damaged_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config"):
        from_pretrained(folder)


def test_a_dtype_of_eight_bits_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match="does not compute in float8_e4m3fn"):
        from_pretrained(folder, dtype="float8_e4m3fn")


@pytest.mark.slow
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


@pytest.mark.slow
def test_host_weights_are_mapped_from_the_checkpoint(folder: Path) -> None:
    weights = sum(p.nbytes for p in llama().parameters())
    model = from_pretrained(folder, max_memory={"cpu": weights}, context_length=16)
    assert "cpu" in model.hf_device_map.values()
    assert all(mapped_region(parameter) is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@alike("share", [3.0, 0.7, 0.9, 1.5], first=1)
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


@pytest.mark.slow
def test_a_plan_that_cannot_be_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(BudgetError, match="cpu"):
        from_pretrained(folder, max_memory={"cpu": 10})


def test_a_dtype_is_cast_to(folder: Path) -> None:
    model = from_pretrained(folder, dtype="bfloat16", device_map="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(TOKENS).logits.dtype == torch.bfloat16
    with pytest.raises(PlanError, match="float99"):
        from_pretrained(folder, dtype="float99")


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("main", ["cpu", 0], first=1)
def test_a_weight_that_the_file_has_in_another_dtype_is_cast_where_it_runs(folder: Path, main: str | int) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    weights = load_file(file)
    weights[name] = weights[name].bfloat16()
    save_file(weights, file, {"format": "pt"})
    resident = from_pretrained(folder, device_map={"": main})
    on_disk = from_pretrained(folder, device_map={"": "disk"}, main_device=main)
    assert on_disk.get_parameter(name).dtype == torch.bfloat16
    ids = torch.arange(6)[None].to("cpu" if main == "cpu" else at(0))
    with torch.no_grad():
        assert torch.equal(on_disk(ids).logits, resident(ids).logits)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "hub" / "owner" / "tiny", max_shard_size="20KB")
    with HubServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        model = from_pretrained("owner/tiny", cache_dir=tmp_path / "cache")
    tokens = TOKENS.to(model.device)
    assert torch.equal(model(tokens).logits, llama().to(model.device)(tokens).logits)


def test_a_path_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        from_pretrained(tmp_path / "nothing")
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "unheard-of"}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=r"config\.json|quantised"):
            from_pretrained(tmp_path)


def marian() -> MarianMTModel:
    """A model whose positions no checkpoint holds."""
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return MarianMTModel(MarianConfig(**sizes, **heads, **tokens)).eval()


def switch() -> SwitchTransformersForConditionalGeneration:
    """A model that casts its routers in each forward."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8}
    config = SwitchTransformersConfig(**sizes, **experts, vocab_size=64, decoder_start_token_id=0)
    return SwitchTransformersForConditionalGeneration(config).eval()


def gemma3n() -> Gemma3nForCausalLM:
    """A model whose layers hand keys and values on in a dict."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 64}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "max_position_embeddings": 64,
    }
    extra = {
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "altup_num_inputs": 2,
    }
    layers = {"layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**sizes, **heads, **extra, **layers)).eval()


def bamba() -> BambaForCausalLM:
    """A hybrid of attention and state space, whose config holds an infinity."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1]}
    state = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return BambaForCausalLM(BambaConfig(**sizes, **heads, **state)).eval()


def t5gemma() -> T5GemmaForConditionalGeneration:
    """A model of two text configs, of which `get_text_config` cannot choose one."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    half = T5GemmaModuleConfig(**sizes, **heads)
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=half, decoder=half, vocab_size=64)).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("make", [bamba, switch, marian, gemma3n, t5gemma], first=1)
def test_families_with_ways_of_their_own_load_and_give_the_bits_of_the_resident_model(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(2, 8).view(1, 6)
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}
    reference = type(model).from_pretrained(tmp_path).eval()
    blocks = [name for name, part in model.named_modules() if name.endswith((".layers.1", ".block.1", ".blocks.1"))]
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path, "cpu")(**inputs).logits, reference(**inputs).logits)
        resident = dispatch_model(reference, {"": 0}, force_hooks=True)(**inputs).logits
        for device_map in ({"": "cpu"}, {"": "disk"}, {"": 0, **dict.fromkeys(blocks, 1)}):
            found = from_pretrained(tmp_path, device_map, main_device=0)
            assert torch.equal(found(**inputs).logits, resident), device_map


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("device_map", [{"": 0, "encoder.block.1": 1}, {"": "disk"}, {"": 0}, {"": "cpu"}], first=1)
def test_routers_that_cast_themselves_are_cast_when_dispatched(device_map: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    switch().save_pretrained(tmp_path)
    reference = SwitchTransformersForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = torch.arange(2, 8).view(1, 6)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    with torch.no_grad():
        resident = dispatch_model(reference, {"": 0}, force_hooks=True)(**inputs).logits
        model = from_pretrained(tmp_path, device_map, dtype=torch.bfloat16, main_device=0)
        inputs = {name: each.to(at(0)) for name, each in inputs.items()}
        assert torch.equal(model(**inputs).logits.cpu(), resident)
    routers = [module for module in model.modules() if hasattr(module, "classifier")]
    assert routers
    assert {router.classifier.weight.dtype for router in routers} == {torch.float32}
