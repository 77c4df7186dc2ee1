"""Sounds, and what robots are moved by, as inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bigmodel.profile import profile_model
from bigmodel.profile.trace.media_inputs import has_encoder, robot_inputs, series_inputs, sound_inputs, sound_shape


def test_sounds_have_two_frames_for_each_position() -> None:
    assert sound_shape(SimpleNamespace()) == (80, 3000)
    assert sound_shape(SimpleNamespace(num_mel_bins=128, max_source_positions=20)) == (128, 40)


def test_a_model_without_an_encoder_of_sounds_gets_none() -> None:
    assert not has_encoder(SimpleNamespace(audio_config=None), "audio_config")
    assert has_encoder(SimpleNamespace(audio_config={}), "audio_config")
    assert has_encoder(SimpleNamespace(), "audio_config")


def test_sounds_are_also_tried_without_a_mask_as_it_may_be_one_of_features() -> None:
    class Listening(nn.Module):
        def forward(self, input_features: torch.Tensor, input_features_mask: torch.Tensor | None = None) -> None: ...

    model = Listening()
    model.config = SimpleNamespace(num_mel_bins=80)  # type: ignore[assignment]
    tried = [inputs.keys() for inputs in sound_inputs(model, 2)]
    masked = tried.count({"input_features", "input_features_mask"})
    assert masked == tried.count({"input_features"}) == len(tried) // 2
    assert all(len(names) == 2 for names in tried[:masked])


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


@pytest.mark.long
@pytest.mark.slow
def test_a_transducer_is_given_a_token_beside_the_sound() -> None:
    encoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.ParakeetTDTConfig(encoder_config={**encoder, "subsampling_conv_channels": 8})
    with torch.device("meta"):
        model = transformers.ParakeetForTDT(config).eval()
    (phase,) = profile_model(model, context_length=16).phases
    assert phase.name == "forward"
    given = [each for each in sound_inputs(model, 2) if "decoder_input_ids" in each]
    assert given
    assert {each["decoder_input_ids"].shape for each in given} == {(2, 1)}


def test_a_codec_is_given_samples_with_features_of_as_many_frames_as_they_have() -> None:
    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.PretrainedConfig()

        def forward(self, input_values: torch.Tensor, input_features: torch.Tensor) -> None: ...

    both = [each for each in sound_inputs(Codec(), 2) if len(each) == 2]
    assert {each["input_values"].shape for each in both} == {(2, 1, 32000)}
    assert (2, 100, 160) in {each["input_features"].shape for each in both}


def sounds(name: str, **config: object) -> set[tuple[int, ...]]:
    """Return the shapes, without the batch, that are tried for a sound which a forward takes under this name."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, {name}): ...", names)
    model: Any = type("Model", (), {"forward": names["forward"], "config": SimpleNamespace(**config)})()
    return {tuple(inputs[name].shape[1:]) for inputs in sound_inputs(model, 2)}


def test_samples_are_of_two_seconds_at_16_and_at_24_khz() -> None:
    assert {(32000,), (48000,), (1, 32000), (1, 48000)} <= sounds("input_values")


def test_a_frame_may_consist_of_several() -> None:
    assert {(3000, 560), (3000, 160), (3000, 320)} <= sounds("input_features", num_mel_bins=80, num_stacked_frames=7)


def test_frames_are_not_more_than_there_are_positions() -> None:
    assert (2048, 80) in sounds("input_features", max_position_embeddings=2049)
    assert sounds("input_features", max_position_embeddings=131072) == sounds("input_features")


def test_a_time_series_has_a_frequency() -> None:
    class Forecasting(nn.Module):
        def forward(self, past_values: torch.Tensor, past_values_padding: torch.Tensor, freq: torch.Tensor) -> None: ...

    model = Forecasting()
    model.config = SimpleNamespace(context_length=64)  # type: ignore[assignment]
    (found,) = [inputs for inputs in series_inputs(model, 2) if "freq" in inputs]
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "past_values": (2, 64),
        "past_values_padding": (2, 64),
        "freq": (2, 1),
    }
