"""Functions of TorchScript can be overridden, for as long as somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bigmodel.devices.scripts import OverriddenScripts, ReplacedMethod


@torch.jit.script
def add(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return x + others[0]


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def twice(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = double(x)
    return found


class Copying(TorchFunctionMode):
    """Counts calls, and gives functions copies."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ != "scripted":
            return func(*args, **kwargs or {})
        self.scripted += 1
        return func(*[each.clone() if isinstance(each, torch.Tensor) else each for each in args], **kwargs or {})


@pytest.fixture
def of_three() -> Iterator[OverriddenScripts]:
    found = OverriddenScripts(lambda tensor: len(tensor) == 3)
    yield found
    found.remove()


@pytest.mark.usefixtures("of_three")
def test_calls_with_the_tensors_asked_for_are_overridden() -> None:
    with Copying() as seen:
        assert add(torch.ones(3), [torch.ones(3)]).tolist() == [2, 2, 2]
        assert add(torch.ones(1), others=[torch.ones(3)]).tolist() == [2, 2, 2]
        assert seen.scripted == 2
        assert add(torch.ones(2), [torch.ones(2)]).tolist() == [2, 2]
        assert seen.scripted == 2


@pytest.mark.usefixtures("of_three")
def test_calls_outside_of_a_mode_are_as_they_were() -> None:
    assert add(torch.ones(3), [torch.ones(3)]).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="missing value for argument 'others'"):
        add(torch.ones(3))


@pytest.mark.usefixtures("of_three")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_a_copy_is_written_into_its_source(mode: Any) -> None:
    with mode(), Copying():
        x = torch.ones(3)
        assert twice(x).tolist() == [2, 2, 2]
        assert x.tolist() == [2, 2, 2]


def test_calls_are_overridden_as_long_as_somebody_asks(of_three: OverriddenScripts) -> None:
    second = OverriddenScripts(lambda tensor: len(tensor) in (3, 4))
    with Copying() as seen:
        of_three.remove()
        add(torch.ones(3), [torch.ones(3)])
        add(torch.ones(4), [torch.ones(4)])
        assert seen.scripted == 2
        second.remove()
        second.remove()
        add(torch.ones(3), [torch.ones(3)])
        assert seen.scripted == 2


def test_the_class_is_as_it_was_before() -> None:
    before = vars(torch.jit.ScriptFunction)["__call__"]  # models of other tests may ask
    OverriddenScripts(lambda _: True).remove()
    assert vars(torch.jit.ScriptFunction)["__call__"] is before


class Base:
    def name(self) -> str:
        return "base"


class Own(Base):
    def name(self) -> str:
        return "own"


class Inheriting(Base):
    pass


def other(self: Base) -> str:
    return "other"


def test_a_method_is_replaced_until_the_last_has_taken_it_back() -> None:
    replaced: ReplacedMethod[str] = ReplacedMethod(Own, "name", other)
    first, second = "first", "second"
    replaced.remove(first)
    assert Own().name() == "own"
    replaced.add(first)
    replaced.add(second)
    replaced.remove(first)
    replaced.remove(first)
    assert Own().name() == "other"
    assert replaced.asking == [second]
    replaced.remove(second)
    assert Own().name() == "own"


def test_a_method_that_is_inherited_is_so_again() -> None:
    replaced: ReplacedMethod[str] = ReplacedMethod(Inheriting, "name", other)
    for _ in range(2):
        replaced.add("one")
        assert Inheriting().name() == "other"
        assert Base().name() == "base"
        replaced.remove("one")
        assert "name" not in vars(Inheriting)
        assert Inheriting().name() == "base"
    replaced.remove("one")
