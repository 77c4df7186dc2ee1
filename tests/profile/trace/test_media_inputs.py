"""Sounds, and what robots are moved by, as inputs."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from bigmodel.profile.trace.media_inputs import has_encoder, robot_inputs, sound_shape


def test_sounds_have_two_frames_for_each_position() -> None:
    assert sound_shape(SimpleNamespace()) == (80, 3000)
    assert sound_shape(SimpleNamespace(num_mel_bins=128, max_source_positions=20)) == (128, 40)


def test_a_model_without_an_encoder_of_sounds_gets_none() -> None:
    assert not has_encoder(SimpleNamespace(audio_config=None), "audio_config")
    assert has_encoder(SimpleNamespace(audio_config={}), "audio_config")
    assert has_encoder(SimpleNamespace(), "audio_config")


def test_a_robot_is_given_its_state_noise_an_image_and_a_text_with_a_token_for_each_patch() -> None:
    model = nn.Module()
    images = SimpleNamespace(image_size=32, patch_size=8, model_type="")
    model.config = SimpleNamespace(  # type: ignore[assignment]
        vlm_config=SimpleNamespace(vision_config=images, model_type=""), chunk_size=5, max_state_dim=7, max_action_dim=6
    )
    (inputs,) = robot_inputs(model, 2, tokens=10)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "state": (2, 7),
        "noise": (2, 5, 6),
        "timestep": (2,),
        "input_ids": (2, 26),
        "pixel_values": (2, 1, 3, 32, 32),
        "pixel_attention_mask": (2, 1),
    }
