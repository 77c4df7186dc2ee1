from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.errors import BigModelError, PlanError
from bigmodel.profile import kv_cache_bytes, profile_model

from .models import Flat, Stack, on_meta, tiny_llama


def test_bytes_of_the_model_count_ties_once() -> None:
    profile = profile_model(on_meta(Stack, tied=True, direct=True))
    model = Stack(tied=True, direct=True)
    assert profile.weights == sum(p.nbytes for p in model.parameters())
    assert profile.buffers == sum(b.nbytes for b in model.buffers())


@pytest.mark.slow
def test_the_kv_cache_is_counted_by_unit() -> None:
    model = tiny_llama()
    profile = profile_model(model, batch_size=2, context_length=64)
    by_name = dict(zip((unit.name for unit in profile.units), profile.kv_cache, strict=True))
    assert by_name["model.layers.3"] == 2 * 64 * 2 * 32 * 4
    assert by_name["lm_head"] == 0
    assert sum(profile.kv_cache) == kv_cache_bytes(model.config, 2, 64, "float32")


@pytest.mark.slow
def test_no_device_has_a_higher_peak_than_one_that_runs_everything() -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64)
    bound = profile.activations + sum(profile.kv_cache)
    for devices in (2, 3):
        spread = {index: index % devices for index in range(len(profile.units))}
        assert all(peak <= bound for peak in profile.dynamic_peaks(spread, 0).values())


@pytest.mark.slow
def test_peaks_that_are_asked_for_again_are_those_of_a_new_replay() -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64)
    split = {index: index % 2 for index in range(len(profile.units))}
    asked: list[dict[str, Any]] = [
        {"execution_devices": split, "main": 0},
        {"execution_devices": split, "main": 1},
        {"execution_devices": {}, "main": 0},
        {"execution_devices": split, "main": 0, "rounding": {0: lambda nbytes: 2 * nbytes}},
        {"execution_devices": split, "main": 0, "input_device": "cpu"},
        {"execution_devices": split, "main": 0, "offloaded": {1: "cpu"}},
    ]
    for _ in range(2):
        for one in asked:
            found = profile.dynamic_peaks(**one)
            assert found == replace(profile).dynamic_peaks(**one)
            found.clear()  # what a caller does with its own is its own


@pytest.mark.slow
def test_outputs_of_a_plain_forward_go_to_the_main_device_wherever_its_first_weights_lie() -> None:
    """Inputs of a forward lie there; `generate` alone moves inputs to the first weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1000))
    profile = profile_model(model, sample_inputs=(torch.ones(2, 4),))
    assert profile.dynamic_peaks({0: "cpu", 1: "cpu"}, 0, input_device="cpu")[0] == 2 * 4 * 4 + 2 * 1000 * 4


@pytest.mark.slow
def test_units_are_in_the_order_they_run() -> None:
    names = [unit.name for unit in profile_model(tiny_llama(), context_length=16).units]
    assert names[:3] == ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    assert names[-2:] == ["model.norm", "lm_head"]


def test_a_context_of_zero_counts_weights_only() -> None:
    profile = profile_model(tiny_llama(), context_length=0)
    assert profile.phases == ()
    assert sum(profile.kv_cache) == profile.activations == 0


@pytest.mark.slow
def test_a_cast_model_has_smaller_weights_and_activations() -> None:
    wide = profile_model(tiny_llama(), context_length=64)
    narrow = profile_model(tiny_llama(), context_length=64, dtype=torch.bfloat16)
    assert narrow.weights * 2 == wide.weights
    assert sum(narrow.kv_cache) * 2 == sum(wide.kv_cache)
    assert narrow.dtype == "bfloat16"


@pytest.mark.slow
def test_new_tokens_are_limited_by_the_context() -> None:
    assert profile_model(tiny_llama(), context_length=16, new_tokens=99).workload.new_tokens == 16


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", "a name"),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("batch_size", 10**30),
        ("context_length", float("nan")),
        ("context_length", "16"),
        ("new_tokens", -1),
        ("cache", []),
        ("all_logits", "yes"),
        ("padded", "no"),
        ("no_split_module_classes", 3),
        ("no_split_module_classes", [nn.Linear]),
        ("special_dtypes", {3: "int8"}),
        ("special_dtypes", "int8"),
        ("sample_inputs", 3),
        ("sample_inputs", "text"),
        ("sample_inputs", {3: torch.ones(2)}),
    ],
)
def test_an_invalid_argument_is_named(argument: str, value: Any) -> None:
    given: dict[str, Any] = {"model": tiny_llama(), "context_length": 16, argument: value}
    with pytest.raises(PlanError, match=argument):
        profile_model(**given)


@pytest.mark.parametrize("wrong", [{"dtype": 16}, {"dtype": "float17"}, {"device_type": "gpu"}, {"device_type": None}])
def test_unknown_dtypes_and_devices_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BigModelError):
        profile_model(Flat(), sample_inputs=torch.ones(2, 3), **wrong)


def test_bytes_of_units_that_share_no_tensor_are_added_up() -> None:
    profile = profile_model(Stack(), context_length=0)
    assert profile.separate_bytes is not None
    found = [part for unit in profile.separate_bytes for part in unit]
    assert sum(nbytes for is_buffer, nbytes in found if not is_buffer) == profile.weights
    assert sum(nbytes for is_buffer, nbytes in found if is_buffer) == profile.buffers
    assert profile_model(tiny_llama(tie_word_embeddings=True), context_length=0).separate_bytes is None
