"""The inputs of models by their libraries' conventions, and inputs described in text."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import PlanError
from bigmodel.profile import profile_model
from bigmodel.profile.trace.inputs import padding_mask, padding_of, parse_inputs, plain_token
from tests.examples import alike

from ..models import Flat


def test_text_describes_inputs_as_tensors_on_meta() -> None:
    found = parse_inputs(["pixel_values=1x3x8x8", "input_ids=2x5", "noise=4:bfloat16"])
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == {
        "pixel_values": ((1, 3, 8, 8), torch.float32),
        "input_ids": ((2, 5), torch.int64),
        "noise": ((4,), torch.bfloat16),
    }
    assert all(tensor.device.type == "meta" for tensor in found.values())


@pytest.mark.parametrize("text", ["pixel_values", "pixel_values=1xtwo", "x=2:float31", "x=", "=3"])
def test_text_that_describes_no_input_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="pixel_values=1x3x224x224"):
        parse_inputs([text])


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("types", [1, 2])
def test_types_of_tokens_are_counted_for_models_that_know_several(types: int) -> None:
    """Their tokenizers give them beside ids and masks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = t.BertModel(t.BertConfig(**sizes, vocab_size=64, type_vocab_size=types)).eval()
    planned = profile_model(model, batch_size=2, context_length=7, device_type="virtual").activations
    names = ["input_ids", "attention_mask", "token_type_ids"][: 1 + types]
    model.to("virtual:0")
    gc.collect()
    before = memory_allocated(0)
    inputs = {name: torch.ones(2, 7, dtype=torch.long, device="virtual:0") for name in names}
    inputs["attention_mask"][1, 0] = 0
    if types > 1:
        inputs["token_type_ids"].zero_()
    reset_peak_memory(0)
    with torch.no_grad():
        model(**inputs)
    assert max_memory_allocated(0) - before == planned


def test_a_plain_token_is_none_of_those_that_the_config_names() -> None:
    config = SimpleNamespace(pad_token_id=3, eos_token_id=[4, 5], image_token_index=6)
    assert plain_token(config) == 7


class TimmLike(nn.Module):
    """A module that says as timm's do which size it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 16, 16)}
        self.stem = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stem(x)


class DiffusersLike(nn.Module):
    """A module whose config describes noisy samples, as those of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"sample_size": 8, "in_channels": 4, "cross_attention_dim": 6}
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.outer = nn.Linear(6, 4)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        assert sample.shape[2:] == (8, 8)
        return self.inner(sample) + self.outer(encoder_hidden_states).mean(1)[..., None, None] * timestep.view(
            -1, 1, 1, 1
        )


@pytest.mark.parametrize("make", [TimmLike, DiffusersLike])
def test_models_of_other_libraries_are_known_by_their_attributes(make: type[nn.Module]) -> None:
    profile = profile_model(make(), batch_size=2)
    assert [phase.name for phase in profile.phases] == ["forward"]
    assert profile.activations > 0
    assert profile.unknown == ""


def test_inputs_that_follow_no_convention_are_noted_as_unknown() -> None:
    assert "not known" in profile_model(Flat()).unknown
    known = profile_model(Flat(), sample_inputs=(torch.empty(20, 3, device="meta"),))
    assert known.unknown == ""
    assert known.activations >= 20 * (4 + 5) * 4


DEVICE = "virtual:0"
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 160,
    "max_position_embeddings": 128,
}  # fmt: skip
DECODING: dict[str, Any] = {"decoder_start_token_id": 0}


def test_the_last_sequence_is_padded() -> None:
    assert padding_mask(1, 3).tolist() == [[0, 1, 1]]
    assert padding_mask(2, 3).tolist() == [[1, 1, 1], [0, 1, 1]]
    assert padding_mask(1, 1).tolist() == [[1]]


def test_generated_tokens_are_no_padding() -> None:
    assert padding_mask(2, 3, prompt=1).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert padding_mask(1, 3, prompt=2).tolist() == [[0, 1, 1]]


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
    types = {} if new_tokens else {"token_type_ids": torch.zeros_like(ids)}  # as a tokenizer gives to an encoder
    given = {"input_ids": ids, "attention_mask": mask.to(DEVICE)}
    before -= ids.nbytes
    with torch.inference_mode():
        if new_tokens:
            model.generate(**given, max_new_tokens=new_tokens, do_sample=False, eos_token_id=10**6, pad_token_id=0)
        else:
            model(**given, **types)
    return max_memory_allocated(DEVICE) - before


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("batch_size", [2, 1], first=1)
@alike("family", ["bert", "grouped", "gpt2", "mistral", "llama", "gemma", "t5", "mamba"], first=1)
def test_sequences_are_planned_at_what_they_take_with_or_without_padding(family: str, batch_size: int) -> None:
    """Kernels of grouped heads take more without a mask, most others with one; layers with a sliding window have
    a mask in any case, Mamba's steps none."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    models: dict[str, Any] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
        "grouped": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=1)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=64, n_layer=2, n_head=8, vocab_size=160, n_positions=128, **special)
        ),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**SIZES, **special, num_key_value_heads=8, head_dim=16)),
        "mistral": lambda: t.MistralForCausalLM(
            t.MistralConfig(**SIZES, **special, num_key_value_heads=8, sliding_window=16)
        ),
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
    shapes = {"batch_size": batch_size, "context_length": 64, "new_tokens": new_tokens, "device_type": "virtual"}
    planned = planned_peak(model, **shapes)
    planned_whole = planned_peak(model, **shapes, padded=False)
    prompt, fed = 64 - new_tokens, new_tokens + (family not in ("bert", "t5"))  # the last token is not fed
    model.to(DEVICE)
    padded, whole = (
        peak(model, mask, fed)
        for mask in (padding_mask(batch_size, prompt), torch.ones(batch_size, prompt, dtype=torch.long))
    )
    assert planned == max(padded, whole)
    not_planned = whole - planned_whole if family == "bert" else 0  # its mask of ones, and what it is turned into
    assert 0 <= not_planned <= 2 * 8 * batch_size * prompt
    assert planned_whole + not_planned == whole
    if family != "mistral":
        assert (padded > whole) is (family != "grouped")


def planned_peak(model: Any, **shapes: Any) -> int:
    """Return the peak bytes planned for a model on one device."""
    profile = profile_model(model, **shapes)
    return profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_a_sequence_that_is_not_padded_is_planned_with_padding_only_if_a_mask_says_so() -> None:
    model: Any = t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()
    prompt, new_tokens = 64, 3
    masks = torch.ones(1, prompt, dtype=torch.long), torch.tensor([[0] * 20 + [1] * 44])
    shapes = {"context_length": prompt + new_tokens, "new_tokens": new_tokens, "device_type": "virtual"}
    samples = [{"input_ids": torch.full((1, prompt), 5), "attention_mask": mask} for mask in masks]
    planned = [planned_peak(model, **shapes, padded=False, sample_inputs=sample) for sample in [None, *samples]]
    model.to(DEVICE)
    without, padded = (peak(model, mask, new_tokens + 1) for mask in masks)
    assert planned == [without, without, max(without, padded)]
    assert padded > without
