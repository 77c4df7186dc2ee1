"""Names that stand for what is not supported: imported, subclassed and compared with; a call says what to use."""

from __future__ import annotations

from importlib import import_module

import pytest

from bigmodel.compat.refused import MEGATRON, Refused, refused
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


MODULES = ("bnb", "dataclasses", "launch", "megatron_lm", "torch_xla", "transformer_engine")
REFUSED = [
    (module, name)
    for module in MODULES
    for name, value in sorted(vars(import_module(f"bigmodel.utils.{module}")).items())
    if isinstance(value, Refused)
]


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_each_says_its_name_and_what_to_use(module: str, name: str) -> None:
    value = getattr(import_module(f"bigmodel.utils.{module}"), name)
    with pytest.raises(TrainError, match=rf"^{name}: .*not .*[;:,] (use|run|train|load)"):
        value("some", argument=1)
    assert value.__doc__.startswith("Not supported: ")
