"""Every architecture that transformers exports runs on every placement as it does undispatched, within its plan.

The list grows by itself. An architecture without a tiny model is skipped with the reason.
"""

from __future__ import annotations

import pytest
import torch

from .placements import PLACEMENTS, Subject
from .test_architectures import architectures
from .tiny import NoTinyModelError, at_most, tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

QUICK = {("bert", "bfloat16"), ("llama", "float32")}
"""Architectures and dtypes that every run of the tests tries; the others are tried by `make zoo`."""

ZOO = [pytest.mark.slow, pytest.mark.zoo]
MOST_SECONDS = 300


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("name", "class_name", "dtype"),
    [
        pytest.param(name, class_name, dtype, id=f"{name}-{dtype}", marks=[] if (name, dtype) in QUICK else ZOO)
        for name, class_name in architectures().items()
        for dtype in DTYPES
    ],
)
def test_every_placement_runs_as_the_model_does_undispatched(name: str, class_name: str, dtype: str) -> None:
    with at_most(MOST_SECONDS):
        try:
            subject = Subject(tiny(name, class_name, DTYPES[dtype]))
        except NoTinyModelError as error:
            pytest.skip(str(error))
        found = {placement: subject.examine(placement).problems for placement in PLACEMENTS}
    assert {placement: problems for placement, problems in found.items() if problems} == {}
