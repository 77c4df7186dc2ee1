from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bigmodel.benchmarks.plan_large import HEADERS, make, planned, report, write_headers
from bigmodel.profile import profile_source
from bigmodel.sources.headers import read_header
from bigmodel.sources.resolve import open_source

from ..examples import alike

PACKED = ("packed", "scale", "shape")


def test_a_checkpoint_of_headers_is_sound_and_names_each_expert(tmp_path: Path) -> None:
    source = open_source(make("671B mixture", tmp_path, quick=True))
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in source.weight_map()


@alike(
    ("name", "leaves"),
    [
        ("1T mixture, int4", [f"weight_{leaf}" for leaf in PACKED]),
        ("671B mixture, fp8", ["weight", "weight_scale_inv"]),
    ],
    first=1,
)
@pytest.mark.slow
def test_quantised_checkpoints_have_the_published_tensors_of_each_expert(
    name: str, leaves: list[str], tmp_path: Path
) -> None:
    source = open_source(make(name, tmp_path, quick=True))
    found = [key for key in source.weight_map() if key.startswith("model.layers.3.mlp.experts.7.up_proj.")]
    assert sorted(found) == sorted(f"model.layers.3.mlp.experts.7.up_proj.{leaf}" for leaf in leaves)
    assert profile_source(tmp_path / f"plan-large-{name.replace(',', '').replace(' ', '-')}-quick").weights == sum(
        entry.nbytes
        for header in source.headers().values()
        for key, entry in header.items()
        if not key.endswith("e_score_correction_bias")
    )


@pytest.mark.slow
def test_it_is_planned_like_any_other(tmp_path: Path) -> None:
    folder = make("405B dense", tmp_path, quick=True)
    found = planned(str(folder), HEADERS, 1)
    assert found["parts"] > 0
    assert found["seconds"] > 0


def test_data_are_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_headers(path, [("a", "BF16", [1024, 1024]), ("b", "BF16", [7])])
    assert read_header(path)["b"].nbytes == 14
    assert path.stat().st_blocks * 512 < 2**16 < path.stat().st_size


@pytest.mark.parametrize(("seconds", "nbytes", "kept"), [(0.9, 10**8, True), (1.1, 10**8, False), (0.9, 2e9, False)])
def test_the_slowest_and_the_largest_plan_are_held_to_the_limits(seconds: float, nbytes: float, kept: bool) -> None:
    rows = [["x", "meta", "one", 0.5, seconds, nbytes, 3], ["y", "meta", "one", 0.5, 0.5, 5.0, 3]]
    found = report(argparse.Namespace(device="cpu"), rows)
    assert all(limit.kept for limit in found.limits) is kept
