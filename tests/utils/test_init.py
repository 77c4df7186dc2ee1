"""bigmodel.utils has what scripts import from accelerate.utils."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import bigmodel
from bigmodel import utils

MODULES = {
    *("ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "launch"),
    *("megatron_lm", "memory", "modeling", "offload", "operations", "other", "random", "rich", "torch_xla"),
    *("transformer_engine", "versions"),
}


def test_every_name_can_be_imported() -> None:
    assert all(getattr(utils, name) is not None for name in utils.__all__)
    assert set(utils.__all__) >= set(bigmodel.__all__) - {"__version__"}
    assert set(dir(utils)) - set(utils.__all__) == MODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'bigmodel\.utils' has no attribute 'nothing'"):
        utils.__getattr__("nothing")


@pytest.mark.slow
def test_every_name_of_accelerate_is_here() -> None:
    theirs = importlib.import_module("accelerate.utils")
    public = {
        name for name in dir(theirs) if not name.startswith("_") and not isinstance(getattr(theirs, name), ModuleType)
    }
    assert public - set(utils.__all__) == set()
