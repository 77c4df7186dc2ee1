from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from bigmodel.profile import Profile, profile_model
from bigmodel.profile.trace import dry_run
from bigmodel.profile.trace.recordings import sharing_recordings

from ..models import tiny_llama

DEPTHS = (5, 7)


def profile_of(layers: int, dtype: str | None = None, **config: Any) -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=layers, **config), context_length=12, new_tokens=4, dtype=dtype)


def profiles() -> list[Profile]:
    """Profiles of models that differ in their depth alone."""
    return [profile_of(layers) for layers in DEPTHS]


@pytest.mark.slow
def test_shared_recordings_give_the_profiles_that_each_model_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = profiles()
    ran: list[int] = []
    run = dry_run._Clone._run

    def counting(self: Any, *args: Any) -> Any:
        ran.append(len(self._units))
        return run(self, *args)

    monkeypatch.setattr(dry_run._Clone, "_run", counting)
    with sharing_recordings():
        found = profiles()
    assert found == expected
    assert len(ran) == 1
    profiles()
    assert len(ran) == 1 + len(DEPTHS)  # none is shared outside


@pytest.mark.long
@pytest.mark.slow
def test_models_that_differ_in_more_share_nothing() -> None:
    def different() -> list[Profile]:
        short, long = DEPTHS
        return [profile_of(short), profile_of(long, "bfloat16"), profile_of(short, hidden_size=32)]

    expected = different()
    with sharing_recordings():
        assert different() == expected


@pytest.mark.long
@pytest.mark.slow
def test_a_model_of_other_layers_shares_nothing() -> None:
    def profile(slides: bool) -> Profile:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        kinds = ["sliding_attention" if slides and at % 2 else "full_attention" for at in range(4)]
        sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = Gemma3TextConfig(**sizes, head_dim=8, vocab_size=32, num_hidden_layers=4, layer_types=kinds)
        config.sliding_window = 4
        return profile_model(Gemma3ForCausalLM(config), context_length=12, new_tokens=4)

    expected = [profile(True), profile(False)]
    assert expected[0].kv_cache != expected[1].kv_cache
    with sharing_recordings():
        assert [profile(True), profile(False)] == expected


@pytest.mark.slow
def test_the_model_of_the_tests_is_one_that_is_sampled() -> None:
    model = tiny_llama(num_hidden_layers=DEPTHS[0])
    assert isinstance(model, LlamaForCausalLM)
    units = profile_model(model, context_length=12).units
    assert dry_run.find_layer_samples(model, units)[0].count < DEPTHS[0]
