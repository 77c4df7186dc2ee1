"""Both names of a tied weight are read from one place, as transformers asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bigmodel.compat.transformers_loading import read_ties_from_one_place

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
