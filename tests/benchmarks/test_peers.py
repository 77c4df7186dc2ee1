"""accelerate and transformers over the same model on the same device."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bigmodel.benchmarks.peers import cuda_streams, generated, streamed_by_accelerate
from bigmodel.devices import memory_allocated, virtual

pytestmark = pytest.mark.virtual_only("a device without CUDA")


@pytest.fixture(autouse=True)
def accelerator() -> object:
    virtual.enable(1)
    yield
    virtual.disable()


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).eval()


PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
LAYERS = [f"model.layers.{number}" for number in range(3)]


@pytest.mark.parametrize("device_map", [None, {**dict.fromkeys(PARTS, 0), **dict.fromkeys(LAYERS, "cpu")}])
def test_accelerate_fetches_what_lies_on_the_host(device_map: dict[str, int | str] | None) -> None:
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        expected = model()(ids).logits
        streamed = streamed_by_accelerate(model(), "virtual:0", device_map)
        resident = memory_allocated(0)
        assert torch.allclose(streamed(ids.to("virtual:0")).logits.cpu(), expected, atol=1e-5)
    held = sum(parameter.nbytes for parameter in streamed.parameters() if parameter.device.type == "virtual")
    assert held <= resident < sum(parameter.nbytes for parameter in model().parameters())


def test_an_offloaded_cache_runs_on_any_accelerator() -> None:
    there = model().to("virtual:0")
    ids = torch.arange(8)[None].to("virtual:0")
    cache = DynamicCache(config=there.config, offloading=True)
    default = torch.cuda.default_stream
    with torch.inference_mode(), cuda_streams():
        offloaded = there(ids, past_key_values=cache).logits
        further = there(ids[:, :1], past_key_values=cache).logits
    assert torch.cuda.default_stream is default
    own = DynamicCache()
    with torch.inference_mode():
        assert torch.equal(offloaded, there(ids, past_key_values=own).logits)
        assert torch.equal(further, there(ids[:, :1], past_key_values=own).logits)
    assert {str(layer.keys.device) for layer in cache.layers} == {"cpu", "virtual:0"}  # the first one is fetched again


def test_what_transformers_generates_is_counted() -> None:
    whole = model()
    alone = generated(whole, [1, 2, 3, 4], 9, "cpu")
    assert (len(alone.tokens), alone.groups, alone.forwards, alone.per_step) == (9, [1] * 9, 9, 1)
    assert alone.seconds_of_token > 0
    proposed = generated(whole, [1, 2, 3, 4], 9, "cpu", prompt_lookup_num_tokens=3)
    assert proposed.tokens == alone.tokens
    assert sum(proposed.groups) == 9
    assert proposed.forwards == len(proposed.groups)
