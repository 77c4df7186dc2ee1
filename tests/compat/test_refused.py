"""Names that stand for what is not supported: imported, subclassed and compared with; a call says what to use."""

from __future__ import annotations

import pytest

from bigmodel.compat.refused import MEGATRON, refused
from bigmodel.errors import TrainError

Plugin = refused("Plugin", MEGATRON)


def test_a_call_names_the_object_and_says_what_to_use() -> None:
    with pytest.raises(TrainError, match=r"Plugin: Megatron-LM is not supported; use FSDP"):
        Plugin(tp_degree=2)


def test_it_may_be_subclassed_and_the_subclass_is_refused_too() -> None:
    class Step(Plugin):  # type: ignore[misc, valid-type]
        def __init__(self, lr: float) -> None:
            raise AssertionError("never made")

    with pytest.raises(TrainError, match="Step: Megatron-LM"):
        Step(0.1)


def test_nothing_is_an_instance_of_it() -> None:
    assert not isinstance(object(), Plugin)


def test_scripts_import_what_they_may_not_use() -> None:
    from bigmodel.utils import MegatronLMPlugin, TERecipeKwargs, install_xla, load_and_quantize_model

    for each in (MegatronLMPlugin, TERecipeKwargs, install_xla, load_and_quantize_model):
        with pytest.raises(TrainError, match=f"{each.__name__}: .* not"):
            each()
