"""Weights that code outside their unit reads are right, resident, streamed and where the host computes with them."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.placement.dispatch_units import find_dispatch_units
from bigmodel.dispatch.placement.lent import lent_tensors, names_read
from bigmodel.dispatch.placement.tensors import DeviceMapLookup
from bigmodel.dispatch.weights.outside_use import is_marked
from bigmodel.errors import DispatchError

WIDTH = 8


pytestmark = pytest.mark.usefixtures("accelerators")


class Three(nn.Module):
    """Three layers, of which the forward of a subclass uses the weights of the second, or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.l, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.l(self.a(x)))


class OnOutputs(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.linear(self.a(x), self.l.weight, self.l.bias))


class OnInputs(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(F.linear(x, self.l.weight)))


class OfAll(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.a.weight, self.l.weight, self.b.weight])
        return self.b(F.linear(x, joined).view(-1, 3, WIDTH).sum(1))


class Penalised(Three):
    """Adds what it computes from weights alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.l.weight.pow(2).sum() + self.a.weight.abs().mean()


class Parameters(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.stack([p.square().sum() for p in self.parameters()]).sum()


class ByProperty(Three):
    @property
    def second(self) -> torch.Tensor:
        return self.l.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) @ self.second


class ByName(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) @ getattr(self.l, "weight")  # noqa: B009


def affine(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(layer.bias, x, layer.weight.t())


class ByFunction(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return affine(self.a, affine(self.l, x)) + self.b(x)


class Listed(nn.Module):
    """Weights in lists and dictionaries of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.many = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        for weight in self.many:
            x = x @ weight
        return self.b(x * self.named["scale"])


class Attributes(Three):
    """Refers to weights in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["second"] = self.l.weight
        self.kept = [self.b.bias]
        self.by_name = {"first": self.a.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.second) @ self.by_name["first"] + self.kept[0]


class Hooked(Three):
    """Hooks that have the module, the layer, or the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.l.weight
        self.a.register_forward_hook(lambda _module, _args, output: output @ self.l.weight)
        self.l.register_forward_hook(functools.partial(_add_bias, self.b))
        self.b.register_forward_pre_hook(lambda _module, args: (args[0] @ weight,))


def _add_bias(layer: nn.Linear, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + layer.bias


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.n(self.a(x)) - self.n.running_mean)


class Borrowing(nn.Module):
    """Computes with the weights of another layer, which it has in a list."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.own(x), self.other[0].weight, self.other[0].bias)


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.t, self.b = Borrowing(self.a), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.t(self.a(x)))


class OwnScale(Three):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.l(self.a(x) * self.scale) * self.scale) * self.scale


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m, self.n, self.l = OnOutputs(), Penalised(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(self.n(self.m(x))) @ self.m.l.weight


class ByComputedName(Three):
    """Makes the names of layers and of their weights as it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(2):
            layer = getattr(self, chr(ord("a") + index), self.l)
            x = F.linear(x, getattr(layer, "".join(["wei", "ght"])))
        return super().forward(x)


class ByPath(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [functools.reduce(getattr, f"{name}.weight".split("."), self) for name in "lab"]
        return super().forward(x) @ torch.stack(weights).sum(0)  # type: ignore[arg-type]


class OfChildren(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = F.linear(x, layer.weight)
        return x


class OfRegistries(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [weight for layer in self._modules.values() for weight in layer._parameters.values()]
        return super().forward(x) + sum(weight.sum() for weight in held)


KINDS: list[Callable[[], nn.Module]] = [
    OnOutputs, OnInputs, OfAll, Penalised, Parameters, ByProperty, ByName, ByFunction, Listed, Attributes, Hooked,
    Buffers, Borrowed, OwnScale, Deep, ByComputedName, ByPath, OfChildren, OfRegistries,
]  # fmt: skip
MAPS: dict[str, tuple[tuple[int | str, ...], dict[str, Any]]] = {
    "resident": ((0, 1), {}),
    "resident from the second on": ((1, 0), {}),
    "resident and streamed": ((0, "cpu", 1), {}),
    "streamed and on disk": (("disk", 1, 0), {}),
    "computed on the host": ((0, "cpu"), {"offload": "compute"}),
}


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def places(model: nn.Module, turns: tuple[int | str, ...]) -> dict[str, int | str]:
    """Return a map with the layers of a model on the devices in turn."""
    leaves = [name for name, module in model.named_modules() if name and not module._modules and module._parameters]
    found = {name: turns[index % len(turns)] for index, name in enumerate(leaves)}
    return {"": 0, **found} if model._parameters else found


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_used_outside_their_unit_give_the_bits_of_the_model_undispatched(
    kind: Callable[[], nn.Module], where: str, tmp_path: Path
) -> None:
    model = built(kind)
    turns, options = MAPS[where]
    with torch.no_grad():
        expected = copy.deepcopy(model)(inputs())
        if kind is Hooked:
            expected = built(kind)(inputs())  # the hooks of a copy have the weights of the original
        dispatch_model(model, places(model, turns), offload_dir=tmp_path, **options)
        for _ in range(2):
            assert torch.equal(model(inputs()).cpu(), expected)
        assert torch.equal(undispatch(model)(inputs()), expected)
    assert not any(is_marked(tensor) for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kind", [OnOutputs, Penalised, Listed, Attributes, OwnScale, Borrowed])
def test_weights_used_outside_their_unit_get_their_gradients(kind: Callable[[], nn.Module]) -> None:
    model = built(kind)
    whole = built(kind)
    dispatch_model(model, places(model, (0, 1)), main_device=0)
    (model(inputs()) ** 2).sum().backward()
    (whole(inputs()) ** 2).sum().backward()
    for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert found.grad is not None, name
        assert expected.grad is not None, name
        assert found.grad.device == found.device
        assert torch.allclose(found.grad.cpu(), expected.grad, rtol=1e-5, atol=1e-6), name


def test_a_weight_in_an_attribute_is_the_model_s_on_one_device_too() -> None:
    model = dispatch_model(built(Attributes), {"": 1})
    assert model.second is model.l.weight
    assert model.second.device == torch.device("virtual:1")
    plain = undispatch(model, "cpu")
    assert plain.second is plain.l.weight
    assert plain.kept[0] is plain.b.bias


def test_a_copy_and_a_file_have_plain_weights(tmp_path: Path) -> None:
    model = built(OnOutputs)
    dispatch_model(model, places(model, (0, 1)))
    assert is_marked(model.l.weight)
    assert not any(is_marked(value) for value in model.state_dict().values())
    assert not is_marked(copy.deepcopy(model.l.weight))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(inputs()), model(inputs()))


def lent(model: nn.Module) -> set[str]:
    placed = {each.name: each for each in DeviceMapLookup({"": 0}).tensors(model)}
    modules = dict(model.named_modules())
    found = {id(tensor) for tensor in lent_tensors(modules, find_dispatch_units(model, modules, placed))}
    return {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) in found}


def test_what_code_reads_is_found_and_what_only_its_unit_reads_is_not() -> None:
    assert lent(built(Three)) == set()
    assert lent(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == set()
    assert lent(built(OnInputs)) == {"l.weight", "a.weight", "b.weight"}  # layers and weights are named apart
    assert lent(built(Parameters)) == {name for name, _ in Parameters().named_parameters()}
    assert lent(built(ByFunction)) >= {"l.weight", "l.bias", "a.weight", "a.bias"}
    assert lent(built(Listed)) == {"many.0", "many.1", "named.scale"}


def test_names_of_libraries_common_code_are_not_read() -> None:
    assert "numel" not in names_read(Three.forward, Three)
    assert {"addmm", "affine", "weight"} <= names_read(ByFunction.forward, ByFunction)


class Hidden(Three):
    """Reads a weight in a way that no code of its own shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) @ _second_weight(self)


_second_weight = operator.attrgetter("l.weight")
"""Stands for a compiled function."""


def test_what_is_not_found_is_one_clear_error_when_it_happens() -> None:
    model = built(Hidden)
    dispatch_model(model, {"a": 0, "l": 1, "b": 0})
    for _ in range(2):
        with pytest.raises(DispatchError, match=r"Hidden\.forward of the model computes with tensors of several"):
            model(inputs())
    assert torch.equal(undispatch(model)(inputs()), built(Hidden)(inputs()))


def test_other_errors_are_as_they_are() -> None:
    model = built(Three)
    dispatch_model(model, {"a": 0, "l": 1, "b": 0})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, WIDTH + 1))
