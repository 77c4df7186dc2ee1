"""One script gives the same losses and tokens with accelerate and, where there is none, with the stand-in."""

from __future__ import annotations

import importlib.util

import pytest

from .answers import answers
from .test_stand_in import VERSION


@pytest.mark.slow  # two interpreters that import transformers
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_trainers_and_models_on_disk_are_those_of_accelerate() -> None:
    expected, found = (answers("same_script", which, ACCELERATE_USE_CPU="true") for which in ("accelerate", "bigmodel"))
    assert expected.pop("distribution") != VERSION
    assert found.pop("distribution") == VERSION
    assert found == expected
    assert len(found["losses of trainer"]) == len(found["losses of seq2seq_trainer"]) == 4
    assert len(found["tokens"][0]) == 14
