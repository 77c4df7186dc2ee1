"""Every architecture that transformers exports runs on every placement as it does undispatched, within its plan.

The list grows by itself. An architecture without a tiny model is skipped with the reason. `make zoo` keeps what each
one did, for the table of the guide (`table`), and does not run again what a run of the same commit has kept.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from .kept import KEPT
from .placements import DTYPES, MIXED, examine_all
from .table import keep, problems_kept
from .test_architectures import architectures
from .tiny import NoTinyModelError, at_most, tiny

QUICK = {("bert", "bfloat16")}
"""Architectures and dtypes that every run of the tests tries."""
LONG = {("llama", "float32")}
"""Those that `make long` tries; the others are tried by `make zoo`, as are these."""


MOST_SECONDS = 600

KEYPOINTS = "how many keypoints it finds in an image, and so all shapes, depends on what its weights compute"
UNKNOWN = {"lightglue": KEYPOINTS}
"""Architectures whose memory cannot be known, and why: they run under the guard of their first forward only."""

NEAR_TIES = {("flex_olmo", "bfloat16")}
"""Architectures and dtypes whose routers, with random weights, choose between experts that differ by a rounding: the
two kinds of devices of a mixed placement may choose others, so that outputs cannot be compared."""


def marks_of(name: str, dtype: str) -> list[pytest.MarkDecorator]:
    kept = [pytest.mark.kept] if any(name in names for names in KEPT.values()) else []
    if (name, dtype) in QUICK:
        return kept
    return [*kept, pytest.mark.long if (name, dtype) in LONG else pytest.mark.zoo]


def test_the_kept_architectures_are_many_and_exported() -> None:
    names = [name for family in KEPT.values() for name in family]
    assert len(set(names)) == len(names) >= 80
    assert set(names) <= set(architectures())


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("name", "class_name", "dtype"),
    [
        pytest.param(name, class_name, dtype, id=f"{name}-{dtype}", marks=marks_of(name, dtype))
        for name, class_name in architectures().items()
        for dtype in DTYPES
    ],
)
def test_every_placement_runs_as_the_model_does_undispatched(name: str, class_name: str, dtype: str) -> None:
    folder = os.environ.get("BIGMODEL_ZOO")
    before = problems_kept(folder, name, dtype)
    if isinstance(before, str):
        pytest.skip(before)
    if before is not None:
        assert before == {}
        return
    if name in UNKNOWN:
        keep(folder, name, dtype, UNKNOWN[name])
        pytest.skip(UNKNOWN[name])
    try:
        with at_most(MOST_SECONDS):
            found = examine_all(name, class_name, dtype)
    except NoTinyModelError as error:
        keep(folder, name, dtype, str(error))
        pytest.skip(str(error))
    if (name, dtype) in NEAR_TIES:
        found = {placement: examined for placement, examined in found.items() if placement not in MIXED}
    keep(folder, name, dtype, found)
    assert {placement: examined.problems for placement, examined in found.items() if examined.problems} == {}


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize(("name", "dtype"), sorted(NEAR_TIES))
def test_routers_of_the_exceptions_choose_between_experts_that_differ_by_a_rounding(name: str, dtype: str) -> None:
    found = tiny(name, architectures()[name], DTYPES[dtype])
    margins: list[float] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        best = (output[0] if isinstance(output, tuple) else output).float().sort(-1, descending=True).values
        chosen, other = best[..., found.model.config.num_experts_per_tok - 1 :][..., :2].unbind(-1)
        margins.append(float(((chosen - other) / chosen.abs()).min()))

    for path, module in found.model.named_modules():
        if path.endswith(".gate"):
            module.register_forward_hook(note)
    with torch.inference_mode():
        found.use(found.model, "cpu")
    assert min(margins) < 2 * torch.finfo(DTYPES[dtype]).eps
