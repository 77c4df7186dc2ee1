"""Inputs of diffusers models, by the names of their forward's arguments and the fields of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bigmodel.profile import profile_model
from bigmodel.profile.trace.diffusion_inputs import IMAGE_TOKENS, PACKED_VIDEO, VIDEO, diffusion_inputs

BATCH = 2


def stand_in(forward: Any, in_time: bool = False, **config: Any) -> nn.Module:
    """Return a model with the given forward and config.

    Args:
        forward: gives the names of the arguments.
        in_time: it has a convolution over time, too.
        config: fields of its config.
    """
    model = nn.Module()
    model.forward = forward  # type: ignore[method-assign]
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    if in_time:
        model.conv = nn.Conv3d(1, 1, 1)
    return model


def shapes(inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def first(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the first candidate."""
    return shapes(next(diffusion_inputs(model, BATCH)))


def test_a_unet_gets_a_grid_of_latents_with_a_time_and_a_text() -> None:
    model = stand_in(
        lambda sample, timestep, encoder_hidden_states: sample, in_channels=4, sample_size=16, cross_attention_dim=32
    )
    assert first(model) == {"sample": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 77, 32)}


def test_images_are_tried_before_videos_unless_a_convolution_is_over_time() -> None:
    for in_time in (False, True):
        model = stand_in(lambda hidden_states: hidden_states, in_time, in_channels=4)
        found = [shapes(inputs)["hidden_states"] for inputs in diffusion_inputs(model, BATCH)]
        image, video = (2, 4, 64, 64), (2, 4, *VIDEO)
        assert found[:2] == ([video, (2, VIDEO[0], 4, *VIDEO[1:])] if in_time else [image, video])
        assert image in found


def test_packed_patches_of_an_image_come_with_their_places() -> None:
    model = stand_in(
        lambda hidden_states, encoder_hidden_states, img_ids, txt_ids: hidden_states,
        in_channels=64,
        joint_attention_dim=48,
    )
    count = IMAGE_TOKENS[0] * IMAGE_TOKENS[1]
    assert first(model) == {
        "hidden_states": (2, count, 64),
        "img_ids": (count, 3),
        "txt_ids": (512, 3),
        "encoder_hidden_states": (2, 512, 48),
    }
    by_shapes = stand_in(lambda hidden_states, img_shapes: hidden_states)
    assert next(diffusion_inputs(by_shapes, BATCH))["img_shapes"] == [[(1, *IMAGE_TOKENS)]] * BATCH


def test_packed_patches_of_a_video_come_with_its_size() -> None:
    model = stand_in(lambda hidden_states, num_frames, height, width: hidden_states, in_channels=8)
    inputs = next(diffusion_inputs(model, BATCH))
    frames, rows, columns = PACKED_VIDEO
    assert inputs["hidden_states"].shape == (2, frames * rows * columns, 8)
    assert (inputs["num_frames"], inputs["height"], inputs["width"]) == PACKED_VIDEO


def test_the_number_of_frames_in_a_config_is_compressed() -> None:
    model = stand_in(
        lambda hidden_states: hidden_states, in_channels=4, sample_frames=9, sample_height=6, sample_width=8
    )
    assert first(model) == {"hidden_states": (2, 4, 3, 6, 8)}


def test_cosines_and_sines_of_positions_are_given_to_models_that_ask_for_them() -> None:
    model = stand_in(
        lambda hidden_states, image_rotary_emb: hidden_states, sample_size=8, patch_size=2, attention_head_dim=16
    )
    cosines, sines = next(diffusion_inputs(model, BATCH))["image_rotary_emb"]
    assert cosines.shape == sines.shape == (16, 16)


def test_classes_and_masks_are_given_and_left_out() -> None:
    model = stand_in(lambda hidden_states, class_labels, encoder_attention_mask: hidden_states, sample_size=8)
    candidates = [set(inputs) - {"hidden_states"} for inputs in diffusion_inputs(model, BATCH)][:3]
    assert candidates == [{"encoder_attention_mask"}, {"encoder_attention_mask", "class_labels"}, set()]


def test_the_pooled_text_and_sizes_of_an_image_fill_what_the_config_says() -> None:
    model = stand_in(
        lambda sample, added_cond_kwargs: sample,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    added = next(diffusion_inputs(model, BATCH))["added_cond_kwargs"]
    assert shapes(added) == {"text_embeds": (2, 32), "time_ids": (2, 6)}


def test_other_models_get_none() -> None:
    assert list(diffusion_inputs(nn.Linear(2, 2), BATCH)) == []
    assert list(diffusion_inputs(stand_in(lambda pixel_values: pixel_values), BATCH)) == []


class Autoencoder(nn.Module):
    """Its decoder takes more memory than its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=3, sample_size=16)
        self.down = nn.Conv2d(3, 4, 2, stride=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"latents": self.down(x)}

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.up(z).repeat(1, 8, 1, 1)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(sample)["latents"])[:, :3]


def test_encoder_and_decoder_of_an_autoencoder_are_recorded_by_themselves_too() -> None:
    profile = profile_model(Autoencoder(), batch_size=BATCH)
    [forward] = profile.phases
    ran = [[profile.units[unit].name for unit in trace.order()] for trace in (*forward.also, forward.trace)]
    assert ran == [["down"], ["up"], ["down", "up"]]
    assert profile.unknown == ""


class Refusing(nn.Module):
    """Takes a video of latents only, and only with classes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=4)
        self.proj = nn.Linear(VIDEO[2], 2)

    def forward(self, hidden_states: torch.Tensor, class_labels: torch.Tensor | None = None) -> torch.Tensor:
        _, _, _, _, _ = hidden_states.shape
        if class_labels is None:
            raise ValueError("no classes")
        return self.proj(hidden_states)


def test_the_first_candidate_that_the_forward_accepts_is_taken() -> None:
    profile = profile_model(Refusing(), batch_size=BATCH)
    assert profile.unknown == ""
    inputs = BATCH * 4 * VIDEO[0] * VIDEO[1]
    assert profile.activations >= 4 * inputs * VIDEO[2]


def test_a_model_that_controls_another_gets_an_image_or_latents() -> None:
    model = stand_in(lambda sample, controlnet_cond: sample, in_channels=4, sample_size=16)
    found = [shapes(inputs)["controlnet_cond"] for inputs in diffusion_inputs(model, BATCH)]
    assert found[:2] == [(2, 3, 128, 128), (2, 4, 16, 16)]


def test_an_image_that_controls_has_the_size_that_its_blocks_shrink_to_that_of_latents() -> None:
    model = stand_in(
        lambda sample, controlnet_cond: sample, in_channels=4, sample_size=16, ctrl_conditioning_channels=2,
        ctrl_conditioning_embedding_out_channels=(8, 8, 8),
    )  # fmt: skip
    assert first(model)["controlnet_cond"] == (2, 2, 64, 64)


def test_latents_have_the_channels_of_the_first_convolution_if_the_config_names_none() -> None:
    model = stand_in(lambda sample: sample, sample_size=16)
    assert first(model)["sample"] == (2, 3, 16, 16)
    model.base_conv_in = nn.Conv2d(4, 8, 3)
    assert first(model)["sample"] == (2, 4, 16, 16)


def test_a_sparse_control_has_a_mask_of_its_pixels() -> None:
    model = stand_in(lambda sample, controlnet_cond, conditioning_mask: sample, in_channels=4, sample_size=16)
    found = [shapes(inputs) for inputs in diffusion_inputs(model, BATCH)]
    assert all(each["conditioning_mask"] == (BATCH, 1, *each["controlnet_cond"][2:]) for each in found)


def test_a_model_of_sounds_gets_samples() -> None:
    model = stand_in(lambda sample, timestep: sample, in_channels=2, sample_size=256)
    model.conv = nn.Conv1d(1, 1, 1)
    assert first(model) == {"sample": (2, 2, 256), "timestep": (2,)}


def test_positions_along_each_axis_are_given_with_channels_last() -> None:
    model = stand_in(
        lambda hidden_states, encoder_hidden_states, pooled_projections, visual_rope_pos, text_rope_pos: hidden_states,
        in_visual_dim=4, visual_cond=True, patch_size=(1, 2, 2), in_text_dim=6, in_text_dim2=5,
    )  # fmt: skip
    inputs = next(diffusion_inputs(model, BATCH))
    assert shapes(inputs) == {
        "hidden_states": (BATCH, *VIDEO, 9),
        "encoder_hidden_states": (BATCH, 512, 6),
        "pooled_projections": (BATCH, 5),
        "text_rope_pos": (512,),
    }
    assert [len(axis) for axis in inputs["visual_rope_pos"]] == [VIDEO[0], VIDEO[1] // 2, VIDEO[2] // 2]


def test_a_model_of_motion_gets_a_text_for_each_frame() -> None:
    model = stand_in(
        lambda sample, encoder_hidden_states: sample,
        True,
        in_channels=4,
        cross_attention_dim=8,
        motion_max_seq_length=32,
    )
    assert first(model)["encoder_hidden_states"] == (2 * VIDEO[0], 77, 8)


def test_places_have_as_many_axes_as_the_rotation() -> None:
    model = stand_in(lambda hidden_states, img_ids, txt_ids: hidden_states, axes_dims_rope=(8, 8, 8, 8))
    assert first(model)["img_ids"][-1] == first(model)["txt_ids"][-1] == 4
