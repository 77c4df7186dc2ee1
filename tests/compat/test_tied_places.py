"""Both names of a tied weight are read from one place, as transformers asks."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.compat.dispatching import fill_from_index
from bigmodel.compat.ties import keep_ties_in_memory, read_ties_from_one_place, ties_made
from bigmodel.compat.transformers_loading import device_map_of

TIED = SimpleNamespace(all_tied_weights_keys={"head.weight": "embed.weight"})
ENTRY = {"safetensors_file": "model.safetensors", "weight_name": "embed.weight"}


def read(places: dict[str, Any], index: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    read_ties_from_one_place(TIED, places, index)
    return [places.get(f"{name}.weight", places[name]) for name in ("embed", "head")], index


def test_a_tie_of_disk_and_another_place_is_left_on_disk() -> None:
    assert read({"embed": "disk", "head": 0}, {"embed.weight": ENTRY}) == (
        ["disk", "disk"],
        {"embed.weight": ENTRY, "head.weight": ENTRY},
    )
    assert read({"embed": "cpu", "head": "disk"}, {}) == (["disk", "disk"], {})  # of a file that is written anew


def test_ties_that_are_in_one_place_or_in_no_file_stay() -> None:
    assert read({"embed": "disk", "head": "disk"}, {}) == (["disk", "disk"], {})
    assert read({"embed": "cpu", "head": 0}, {}) == (["cpu", 0], {})


def test_a_plan_without_an_accelerator_keeps_in_memory_what_one_name_has_there() -> None:
    places: dict[str, Any] = {"embed": "cpu", "layers": "disk", "head": "disk"}
    keep_ties_in_memory(TIED, places)
    assert places == {"embed": "cpu", "layers": "disk", "head": "cpu"}
    places = {"embed": "disk", "layers": "cpu", "head": "disk"}
    keep_ties_in_memory(TIED, places)
    assert places == {"embed": "disk", "layers": "cpu", "head": "disk"}
    whole: dict[str, Any] = {"": "disk", "head": "cpu"}
    keep_ties_in_memory(TIED, whole)
    assert whole == {"": "disk", "embed": "cpu", "head": "cpu"}


def test_a_tied_weight_on_meta_is_filled_under_all_of_its_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"stored": torch.arange(6.0).view(3, 2)}, file)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Embedding(3, 2))
    model[0].weight = model[1].weight
    fill_from_index(model, {"1.weight": {"safetensors_file": str(file), "weight_name": "stored"}}, None)
    assert model[0].weight is model[1].weight
    assert model[0].weight.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_weights_that_will_be_tied_are_planned_as_one() -> None:
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(embed=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False)))
    head = model.head.weight
    model.all_tied_weights_keys = {"head.weight": "embed.weight", "gone.weight": "embed.weight"}  # type: ignore[assignment]
    with ties_made(model):
        assert model.head.weight is model.embed.weight
    assert model.head.weight is head


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_a_plan_has_both_names_of_a_tied_weight_in_one_place() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = Gemma2ForCausalLM(config)
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))  # as before it is loaded
    places = device_map_of(None, model, "balanced", {0: "1MB", 1: "1MB"}, None)
    assert {0, 1} == set(places.values())
    assert places["lm_head"] == places["model.embed_tokens"]
