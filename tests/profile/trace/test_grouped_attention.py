"""Chunks of prompts attend to keys and values as they are: the same bits as with copies for every head, less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.profile import attention_by_group
from bigmodel.profile.trace.grouped_attention import NAME

pytestmark = pytest.mark.usefixtures("accelerators")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()


def with_windows() -> Any:
    torch.manual_seed(0)
    return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, sliding_window=16, head_dim=8)).eval()


def scores(model: Any, rows: int) -> torch.Tensor:
    """Generate in chunks of 16 tokens; the second of several sequences begins with padding."""
    ids = 3 + torch.arange(rows * 40).view(rows, 40) % 60
    mask = torch.ones_like(ids)
    mask[1:2, :7] = 0
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": 2**31}
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=mask, prefill_chunk_size=16, output_logits=True, return_dict_in_generate=True, **options
        )
    return torch.stack(found.logits)


def seen_in(model: Any) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


@pytest.mark.parametrize("make", [llama, with_windows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_bits_are_those_of_copied_keys_and_values(make: Callable[[], Any], dtype: torch.dtype, rows: int) -> None:
    model = make().to(dtype)
    expected = scores(model, rows)
    with attention_by_group(model):
        assert torch.equal(scores(model, rows), expected)


@pytest.mark.slow
def test_keys_and_values_are_not_copied() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 64, generator=generator).to("virtual:0")
        for heads, tokens in ((16, 4), (2, 1024), (2, 1024))
    )
    mask = torch.ones(1, 1, 4, 1024, dtype=torch.bool, device="virtual:0")
    module = torch.nn.Module()
    module.num_key_value_groups = 8  # type: ignore[assignment]
    outputs, peaks = [], []
    for name in ("sdpa", NAME):
        with attention_by_group(llama()):
            attend: Any = t.AttentionInterface()[name]
        reset_peak_memory(0)
        begun = max_memory_allocated(0)
        outputs.append(attend(module, query, key, value, mask)[0])
        peaks.append(max_memory_allocated(0) - begun)
    assert torch.equal(*outputs)
    copies = 2 * 8 * key.nbytes
    assert peaks[0] > copies > 10 * peaks[1]


def test_the_model_has_its_own_function_again_after_the_last_context() -> None:
    model = llama()
    assert seen_in(model) == {"sdpa"}
    with pytest.raises(KeyError), attention_by_group(model), attention_by_group(model):
        assert seen_in(model) == {NAME}
        raise KeyError
    assert seen_in(model) == {"sdpa"}
    with attention_by_group(model):
        with attention_by_group(model):
            pass
        assert seen_in(model) == {NAME}
    assert seen_in(model) == {"sdpa"}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(t.LlamaForCausalLM(t.LlamaConfig(**{**SIZES, "num_key_value_heads": 8})), id="as-many-heads"),
        pytest.param(
            t.LlamaForCausalLM._from_config(t.LlamaConfig(**SIZES), attn_implementation="eager"), id="another-function"
        ),
        pytest.param(torch.nn.Linear(2, 2), id="no-transformer"),
    ],
)
def test_what_copies_nothing_is_left_as_it_is(model: Any) -> None:
    before = seen_in(model)
    with attention_by_group(model):
        assert seen_in(model) == before
        assert NAME not in before


def test_a_model_that_asks_for_the_name_of_its_function_is_left_as_it_is() -> None:
    """Falcon adds no mask of its own unless the name is the one that it knows."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    model = t.FalconForCausalLM(t.FalconConfig(**sizes))
    for module in model.modules():
        if type(module).__name__ == "FalconAttention":
            module.num_key_value_groups = 4  # type: ignore[assignment]
    with attention_by_group(model):
        assert seen_in(model) == {"sdpa"}


def test_what_only_the_replaced_function_understands_is_left_to_it() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    query, key = torch.ones(1, 8, 2, 4), torch.ones(1, 2, 3, 4)
    with attention_by_group(model):
        attend: Any = t.AttentionInterface()[NAME]
        with pytest.raises(ValueError, match="softcap"):
            attend(attention, query, key, key, torch.ones(1, 1, 2, 3, dtype=torch.bool), softcap=1.0)
