from __future__ import annotations

import torch
from torch import nn

from bigmodel.profile import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)

from ..models import Flat, Stack, on_meta


def test_sizes_of_every_prefix() -> None:
    sizes = compute_module_sizes(Flat())
    assert sizes[""] == 236
    assert (sizes["linear1"], sizes["batchnorm"], sizes["linear2"]) == (64, 72, 100)
    assert sizes["linear1.weight"] == 48


def test_agrees_with_accelerate_where_nothing_is_tied() -> None:
    from accelerate.utils import compute_module_sizes as reference

    for model in (Flat(), on_meta(Stack, direct=True)):
        for dtype in (None, "float16", torch.float64):
            ours = compute_module_sizes(model, dtype)
            assert {name: size for name, size in ours.items() if size} == dict(reference(model, dtype))


def test_a_tied_tensor_counts_once_in_the_model_and_in_each_module_that_holds_it() -> None:
    sizes = compute_module_sizes(on_meta(Stack, width=16, vocabulary=32, tied=True))
    assert sizes["embed"] == sizes["head"] == 32 * 16 * 4
    untied = compute_module_sizes(on_meta(Stack, width=16, vocabulary=32))
    assert untied[""] - sizes[""] == 32 * 16 * 4


def test_buffers_alone() -> None:
    assert compute_module_total_buffer_size(Flat()) == 40
    assert compute_module_sizes(Flat(), buffers_only=True)["linear1"] == 0


def test_modules_without_tensors_have_no_bytes() -> None:
    assert compute_module_sizes(nn.Sequential(nn.ReLU()))["0"] == 0


def test_largest_layers_with_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(4, 4))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, None) == (80, ["1", "2"])
    assert get_max_layer_size([("", model)], sizes, ["Sequential"]) == (184, [""])


def test_the_largest_layer_of_a_model_with_blocks_is_a_block() -> None:
    total, (largest, names) = calculate_maximum_sizes(on_meta(Stack, width=16, depth=3))
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert largest == (16 * 64 * 2 + 64 + 16) * 4
    assert total == compute_module_sizes(on_meta(Stack, width=16, depth=3))[""]
