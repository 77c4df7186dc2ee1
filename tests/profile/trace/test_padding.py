"""Padded batches: their masks, and plans that hold for them as for batches without padding."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.padding import may_be_padded, padding_mask, padding_of
from bigmodel.profile.trace.workload import Workload

DEVICE = "virtual:0"
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 160,
    "max_position_embeddings": 128,
}  # fmt: skip
DECODING: dict[str, Any] = {"decoder_start_token_id": 0}


def test_only_a_batch_of_several_sequences_may_be_padded() -> None:
    assert [may_be_padded(Workload(batch_size=count)) for count in (1, 2)] == [False, True]
    assert padding_mask(1, 3).tolist() == [[1, 1, 1]]
    assert padding_mask(2, 3).tolist() == [[1, 1, 1], [0, 1, 1]]


def test_generated_tokens_are_no_padding() -> None:
    assert padding_mask(2, 3, prompt=1).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_forward_gets_the_masks_that_it_takes() -> None:
    ids, pixels = torch.zeros(2, 3, dtype=torch.long), torch.empty(2, 3, 8, 8, device="meta")
    assert padding_of({"input_ids": ids}, {"input_ids", "attention_mask"})["attention_mask"].tolist() == [
        [1, 1, 1],
        [0, 1, 1],
    ]
    assert padding_of({"input_ids": ids}, {"input_ids"}) == {}
    assert padding_of({"pixel_values": pixels}, {"pixel_values", "attention_mask"}) == {}


def test_masks_among_the_inputs_are_replaced_by_masks_of_padding() -> None:
    inputs = {"pixel_mask": torch.ones(2, 2, 3, dtype=torch.bool), "spatial_shapes": torch.ones(2, 2)}
    found = padding_of(inputs, inputs.keys())
    assert list(found) == ["pixel_mask"]
    assert found["pixel_mask"].int().tolist() == [[[1, 1, 1], [1, 1, 1]], [[1, 1, 0], [1, 1, 0]]]


def peak(model: Any, mask: torch.Tensor, new_tokens: int) -> int:
    """Return the peak bytes of the device while a model generates from texts with a mask, or runs one forward."""
    ids = torch.full(mask.shape, 5).to(DEVICE)
    gc.collect()
    reset_peak_memory(DEVICE)
    before = memory_allocated(DEVICE) - sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    given = {"input_ids": ids, "attention_mask": mask.to(DEVICE)}
    before -= ids.nbytes
    with torch.inference_mode():
        if new_tokens:
            model.generate(**given, max_new_tokens=new_tokens, do_sample=False, eos_token_id=10**6, pad_token_id=0)
        else:
            model(**given)
    return max_memory_allocated(DEVICE) - before


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("family", ["llama", "t5", "bert", "mamba"])
def test_a_batch_is_planned_at_what_it_takes_with_or_without_padding(family: str) -> None:
    """Kernels of grouped heads take more without a mask, most others with one; Mamba's steps are given none."""
    models: dict[str, Any] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=1)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=64, d_ff=96, d_kv=16, num_heads=4, num_layers=2, vocab_size=160, decoder_start_token_id=0
            )
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**SIZES)),
        "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=160)),
    }
    model = models[family]().eval()
    new_tokens = 0 if family == "bert" else 3
    shapes = {"batch_size": 2, "context_length": 24, "new_tokens": new_tokens}
    profile = profile_model(model, **shapes, device_type="virtual")
    planned = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    prompt, fed = 24 - new_tokens, new_tokens + (family in ("llama", "mamba"))  # the last token is not fed
    model.to(DEVICE)
    masks = padding_mask(2, prompt), torch.ones(2, prompt, dtype=torch.long)
    taken = [peak(model, mask, fed) for mask in masks]
    assert max(taken) == planned
    assert (taken[1] > taken[0]) is (family == "llama")
