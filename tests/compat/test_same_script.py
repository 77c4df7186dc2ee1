"""One script gives the same losses and tokens with accelerate and, where there is none, with the stand-in."""

from __future__ import annotations

import importlib.util

import pytest

from .answers import ALONE, preloaded_answers
from .test_stand_in import VERSION

MODULES = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama")


@pytest.mark.long
@pytest.mark.slow  # servers of preloaded programs import transformers
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_trainers_and_models_on_disk_are_those_of_accelerate() -> None:
    expected, found = (
        preloaded_answers("same_script", prelude=prelude, modules=MODULES, ACCELERATE_USE_CPU="true")
        for prelude in ("", ALONE)
    )
    assert expected.pop("distribution") != VERSION
    assert found.pop("distribution") == VERSION
    assert found == expected
    assert len(found["losses of trainer"]) == len(found["losses of seq2seq_trainer"]) == 4
    assert len(found["tokens"][0]) == 14
