"""Every architecture that transformers exports runs on every placement as it does undispatched, within its plan.

The list grows by itself. An architecture without a tiny model is skipped with the reason. `make zoo` keeps what each
one did, for the table of the guide (`table`), and does not run again what a run of the same commit has kept.
"""

from __future__ import annotations

import os

import pytest

from .kept import KEPT
from .placements import DTYPES, examine_all
from .table import keep, problems_kept
from .test_architectures import architectures
from .tiny import NoTinyModelError, at_most

QUICK = {("bert", "bfloat16"), ("llama", "float32")}
"""Architectures and dtypes that every run of the tests tries; the others are tried by `make zoo`."""


MOST_SECONDS = 600


def marks_of(name: str, dtype: str) -> list[pytest.MarkDecorator]:
    kept = [pytest.mark.kept] if any(name in names for names in KEPT.values()) else []
    return kept if (name, dtype) in QUICK else [*kept, pytest.mark.zoo]


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
    try:
        with at_most(MOST_SECONDS):
            found = examine_all(name, class_name, dtype)
    except NoTinyModelError as error:
        keep(folder, name, dtype, str(error))
        pytest.skip(str(error))
    keep(folder, name, dtype, found)
    assert {placement: examined.problems for placement, examined in found.items() if examined.problems} == {}
