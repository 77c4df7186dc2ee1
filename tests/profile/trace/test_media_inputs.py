"""Sounds as inputs."""

from __future__ import annotations

from types import SimpleNamespace

from bigmodel.profile.trace.media_inputs import has_encoder, sound_shape


def test_sounds_have_two_frames_for_each_position() -> None:
    assert sound_shape(SimpleNamespace()) == (80, 3000)
    assert sound_shape(SimpleNamespace(num_mel_bins=128, max_source_positions=20)) == (128, 40)


def test_a_model_without_an_encoder_of_sounds_gets_none() -> None:
    assert not has_encoder(SimpleNamespace(audio_config=None), "audio_config")
    assert has_encoder(SimpleNamespace(audio_config={}), "audio_config")
    assert has_encoder(SimpleNamespace(), "audio_config")
