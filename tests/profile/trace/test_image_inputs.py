"""Images as inputs of transformers models: their layouts, by configs and the names of arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.profile import profile_model
from bigmodel.profile.trace.image_inputs import image_inputs, image_shape

from ...examples import alike
from ..models import on_meta


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, (3, 224, 224)),
        ({"image_size": 32, "num_channels": 1}, (1, 32, 32)),
        ({"image_size": (16, 48)}, (3, 16, 48)),
        ({"vision_config": SimpleNamespace(image_size=64), "image_size": 32}, (3, 64, 64)),
    ],
)
def test_images_have_the_size_in_the_config(config: dict[str, Any], shape: tuple[int, int, int]) -> None:
    assert image_shape(SimpleNamespace(**config)) == shape


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
VISION: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 160, "max_position_embeddings": 128, "pad_token_id": 0}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}


def smolvlm() -> Any:
    """Several images for each sequence, some of which may be padding."""
    vision, text = {**VISION, "model_type": "smolvlm_vision"}, {**DECODER, "model_type": "llama"}
    config = t.SmolVLMConfig(vision_config=vision, text_config=text, scale_factor=2, image_token_id=150)
    return on_meta(t.SmolVLMForConditionalGeneration, config)


def blip2() -> Any:
    """Images that a transformer of queries reads; the text has placeholders, and the class does not generate."""
    queries = {**TEXT, "encoder_hidden_size": 64, "model_type": "blip_2_qformer"}
    text = {**TEXT, "ffn_dim": 96, "word_embed_proj_dim": 64, "model_type": "opt"}
    settings: dict[str, Any] = {"num_query_tokens": 8, "image_token_index": 150}
    config = t.Blip2Config(vision_config=VISION, qformer_config=queries, text_config=text, **settings)
    return on_meta(t.Blip2ForConditionalGeneration, config)


def instructblip() -> Any:
    """As BLIP-2, with a text for the queries."""
    queries = {**TEXT, "encoder_hidden_size": 64, "model_type": "instructblip_qformer"}
    text = {**TEXT, "ffn_dim": 96, "word_embed_proj_dim": 64, "model_type": "opt"}
    settings: dict[str, Any] = {"num_query_tokens": 8, "image_token_index": 150}
    config = t.InstructBlipConfig(vision_config=VISION, qformer_config=queries, text_config=text, **settings)
    return on_meta(t.InstructBlipForConditionalGeneration, config)


def llava_next() -> Any:
    """Images of several resolutions, cut into tiles."""
    vision, text = t.CLIPVisionConfig(**VISION), t.LlamaConfig(**DECODER)
    config = t.LlavaNextConfig(
        vision_config=vision, text_config=text, image_token_index=150, image_grid_pinpoints=[[32, 64], [64, 64]]
    )
    return on_meta(t.LlavaNextForConditionalGeneration, config)


def fuyu() -> Any:
    """Images as lists of patches, read by the decoder itself."""
    config = t.FuyuConfig(**TEXT, text_config={**TEXT, "model_type": "persimmon"}, image_token_id=150, patch_size=8)
    return on_meta(t.FuyuForCausalLM, config)


@pytest.mark.slow
@alike("make", [fuyu, llava_next, instructblip, smolvlm, blip2], first=1)
def test_the_memory_of_an_image_is_known(make: Callable[[], Any]) -> None:
    profile = profile_model(make(), context_length=64, new_tokens=2)
    assert profile.phases
    assert profile.unknown == ""


def candidates(arguments: str, **config: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the inputs tried for a model whose forward takes these arguments."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, {arguments}): ...", names)
    settings = SimpleNamespace(**config)
    model: Any = type("Model", (), {"forward": names["forward"], "config": settings})()
    return [{name: tuple(value.shape) for name, value in each.items()} for each in image_inputs(model, 1)]


def test_the_largest_resolution_is_cut_into_the_most_tiles() -> None:
    first = candidates("pixel_values, image_sizes", image_size=32, image_grid_pinpoints=[[32, 64], [64, 96]])[0]
    assert first == {"pixel_values": (1, 7, 3, 32, 32), "image_sizes": (1, 2)}


def test_masks_are_of_pixels_or_of_images() -> None:
    found = candidates("pixel_values, pixel_attention_mask", image_size=8)
    assert [each.get("pixel_attention_mask") for each in found[:3]] == [None, (1, 8, 8), (1,)]


def test_an_image_has_the_sizes_that_a_projector_knows() -> None:
    known = {"projector_patch_to_query_dict": {"4": 1, "16": 2}, "patch_size": 8, "image_size": 8}
    sizes = {each["pixel_values"][-1] for each in candidates("pixel_values", **known) if len(each["pixel_values"]) == 4}
    assert sizes == {8, 16, 32}


def test_an_image_that_is_scaled_down_is_as_large_as_its_patches_at_the_smallest_scale() -> None:
    class Model:
        config = SimpleNamespace(patch_size=16, image_size=16, scaled_images_ratios=(0.25, 0.5, 1))

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values

    found = [tuple(inputs["pixel_values"].shape) for inputs in image_inputs(Model(), 2)]  # type: ignore[arg-type]
    assert (2, 3, 64, 64) in found


def test_windows_divide_the_patches_of_an_image() -> None:
    found = candidates("pixel_values", image_size=518, patch_size=14, num_windows=4)
    assert {"pixel_values": (1, 3, 560, 560)} in found


def test_an_image_comes_with_an_example_of_its_shape() -> None:
    found = candidates("pixel_values, prompt_pixel_values, prompt_masks", image_size=8)
    shape = (1, 3, 8, 8)
    assert found[0] == {"pixel_values": shape, "prompt_pixel_values": shape, "prompt_masks": shape}


def test_an_image_comes_with_the_text_of_a_task() -> None:
    assert candidates("pixel_values, task_inputs", image_size=8, task_seq_len=5)[0]["task_inputs"] == (1, 5)


@pytest.mark.parametrize("name", ["image_position_ids", "pixel_position_ids"])
def test_patches_come_with_their_places(name: str) -> None:
    found = candidates(f"pixel_values, {name}", patch_size=4, default_output_length=9, pooling_kernel_size=2)
    assert {"pixel_values": (1, 36, 48), name: (1, 36, 2)} in found


def test_an_image_comes_with_its_rows_and_columns_of_patches() -> None:
    found = candidates("pixel_values, target_sizes", image_size=32, patch_size=8)
    assert {"pixel_values": (1, 3, 32, 32), "target_sizes": (1, 2)} in found
