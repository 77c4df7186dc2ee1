"""Generation decides by the device that a dispatched model runs on, and runs prompts in the chunks of its plan."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from bigmodel import dispatch_model, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch.attach.decoding import METHOD
from bigmodel.plan import plan
from bigmodel.profile import profile_model

from ...examples import alike
from ..models import llama

pytestmark = pytest.mark.usefixtures("accelerators")


def mixture() -> Any:
    config = Qwen2MoeConfig(
        hidden_size=16, intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        vocab_size=32,
    )  # fmt: skip
    return Qwen2MoeForCausalLM._from_config(config, experts_implementation="grouped_mm").eval()


def when_decoding(model: Any) -> set[str]:
    """Return the experts functions within the context of steps."""
    with getattr(model, METHOD)():
        return set(model.get_experts_implementation().values())


@pytest.mark.parametrize(("where", "main"), [("cpu", "virtual:0"), ("cpu", None), (0, None)])
def test_steps_use_the_experts_function_of_the_resident_model_on_the_main_device(where: Any, main: Any) -> None:
    resident = mixture().to(main or ("virtual:0" if where == 0 else "cpu"))
    model = dispatch_model(mixture(), {"": where}, main_device=main)
    assert when_decoding(model) == when_decoding(resident)
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


def test_an_undispatched_model_decides_by_its_weights_again() -> None:
    model = undispatch(dispatch_model(mixture(), {"": "cpu"}, main_device="virtual:0"))
    assert METHOD not in vars(model)
    assert when_decoding(model) == {"grouped_mm"}


def test_a_model_that_does_not_generate_gets_no_such_method() -> None:
    model = dispatch_model(nn.Linear(2, 2), {"": "cpu"}, main_device="virtual:0")
    assert METHOD not in vars(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)


PROMPT = torch.arange(93)[None] % 60
SHAPES: dict[str, Any] = {"context_length": 96, "new_tokens": 3, "padded": False, "prefill_chunk_size": 32}


def text_model() -> Any:
    return llama(4, hidden_size=64, intermediate_size=512, num_key_value_heads=2, vocab_size=96)


def generated(model: Any, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        ids = PROMPT.to("virtual:0")
        found: torch.Tensor = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)
    return found.cpu()


def lengths(model: Any) -> list[int]:
    """Return how many tokens each forward of a generation computes, but for the steps after the prompt."""
    seen: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    generated(model)
    handle.remove()
    return [count for count in seen if count > 1]


@pytest.mark.slow
@alike("share", [0.7, 1.0], first=1)
def test_generate_runs_prompts_in_the_chunks_of_the_plan_and_keeps_to_its_bytes(share: float) -> None:
    profile = profile_model(text_model(), device_type="virtual", **SHAPES)
    total = plan(profile, {0: 10**9, "cpu": 10**9}).devices[0].total
    found = plan(profile, {0: int(share * total), "cpu": 10**9})
    assert bool(found.streamed) == (share < 1)
    expected = generated(text_model().to("virtual:0"), prefill_chunk_size=32)
    gc.collect()
    before = memory_allocated(0)
    model = dispatch_model(text_model(), found)
    reset_peak_memory(0)
    assert torch.equal(generated(model), expected)
    assert max_memory_allocated(0) - before == found.devices[0].total <= int(share * total)
    assert lengths(model) == [32, 32, 29]


@pytest.mark.long
@pytest.mark.slow
def test_a_size_that_is_asked_for_is_used_and_the_models_own_settings_stay() -> None:
    found = plan(profile_model(text_model(), device_type="virtual", **SHAPES), {0: 10**9, "cpu": 10**9})
    model = dispatch_model(text_model(), found)
    assert lengths(model) == [32, 32, 29]
    assert model.generation_config.prefill_chunk_size is None
    model.generation_config.prefill_chunk_size = 50
    assert lengths(model) == [50, 43]
    model.generation_config.prefill_chunk_size = None
    undispatch(model, "virtual:0")
    assert lengths(model) == [93]


@pytest.mark.slow
def test_prompts_that_are_more_than_text_are_whole() -> None:
    found = plan(profile_model(text_model(), device_type="virtual", **SHAPES), {0: 10**9, "cpu": 10**9})
    model = dispatch_model(text_model(), found)
    embedded = model.model.embed_tokens(PROMPT.to("virtual:0"))
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with torch.inference_mode():
        model.generate(inputs_embeds=embedded, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert seen[0] == 93
