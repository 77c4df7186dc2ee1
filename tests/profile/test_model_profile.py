from __future__ import annotations

from bigmodel.profile import kv_cache_bytes, profile_model

from .models import Stack, on_meta, tiny_llama


def test_bytes_of_the_model_count_ties_once() -> None:
    profile = profile_model(on_meta(Stack, tied=True, direct=True))
    model = Stack(tied=True, direct=True)
    assert profile.weights == sum(p.nbytes for p in model.parameters())
    assert profile.buffers == sum(b.nbytes for b in model.buffers())


def test_the_kv_cache_is_counted_by_unit() -> None:
    model = tiny_llama()
    profile = profile_model(model, batch_size=2, context_length=64)
    by_name = dict(zip((unit.name for unit in profile.units), profile.kv_cache, strict=True))
    assert by_name["model.layers.3"] == 2 * 64 * 2 * 32 * 4
    assert by_name["lm_head"] == 0
    assert sum(profile.kv_cache) == kv_cache_bytes(model.config, 2, 64, "float32")


def test_no_device_peaks_higher_than_one_that_runs_everything() -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64)
    bound = profile.activations + sum(profile.kv_cache)
    for devices in (2, 3):
        spread = {index: index % devices for index in range(len(profile.units))}
        assert all(peak <= bound for peak in profile.dynamic_peaks(spread, 0).values())
