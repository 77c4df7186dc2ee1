"""Features of images that a forward returns and the next step takes: plans of Idefics hold, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.image_states import inputs_of_step, mask_of_images
from bigmodel.profile.trace.workload import Workload

from ...examples import alike

DEVICE = "virtual:0"
BATCH, PROMPT, NEW, IMAGES = 2, 12, 4, 1
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


def idefics(use_resampler: bool) -> Any:
    vision = {
        "embed_dim": 32, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    perceiver = {"resampler_n_latents": 8, "resampler_depth": 2, "resampler_n_heads": 2, "resampler_head_dim": 16}
    config = t.IdeficsConfig(
        **SIZES, vocab_size=160, additional_vocab_size=2, cross_layer_interval=2, use_resampler=use_resampler,
        vision_config=vision, perceiver_config=perceiver, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return t.IdeficsForVisionText2Text(config).eval()


@pytest.mark.usefixtures("accelerators")
@alike("use_resampler", [True, False], first=1)
@pytest.mark.slow
def test_the_peak_of_generating_is_planned_to_the_byte(use_resampler: bool) -> None:
    torch.manual_seed(0)
    model = idefics(use_resampler)
    profile = profile_model(model, batch_size=BATCH, context_length=PROMPT + NEW, new_tokens=NEW, device_type="virtual")
    assert profile.unknown == ""
    assert [phase.name for phase in profile.phases] == ["prefill", "decode"]
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    ids = torch.full((BATCH, PROMPT), 5)
    mask = torch.ones_like(ids)
    mask[-1, 0] = 0
    inputs = {
        "input_ids": ids, "attention_mask": mask, "pixel_values": torch.zeros(BATCH, IMAGES, 3, 32, 32),
        "image_attention_mask": torch.ones(BATCH, PROMPT, IMAGES, dtype=torch.long),
    }  # fmt: skip
    inputs = {name: value.to(DEVICE) for name, value in inputs.items()}
    gc.collect()
    reset_peak_memory(DEVICE)
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=NEW + 1, do_sample=False, eos_token_id=10**6, pad_token_id=0)
    measured = max_memory_allocated(DEVICE) - before
    assert measured == profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]


class OtherMask:
    """A session of a model whose argument of this name means something else, as Phi-4's."""

    workload = Workload(BATCH, PROMPT)

    def accepts(self, name: str) -> bool:
        return name in ("pixel_values", "image_attention_mask")


def test_masks_of_images_of_other_models_are_left_alone() -> None:
    session: Any = OtherMask()
    pixels = torch.empty(BATCH, 2, 3, 8, 8, device="meta")
    assert mask_of_images(session, {"pixel_values": pixels}, PROMPT) == {}
    assert inputs_of_step(session, {"pixel_values": pixels}, None, 1) == {}
