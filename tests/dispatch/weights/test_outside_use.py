"""Offloaded weights used outside the forward of their unit are copied to the device of the other operands."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.weights.outside_use import recorded_uses
from bigmodel.errors import DispatchError

from ...accelerators import at
from ..models import Block

pytestmark = pytest.mark.usefixtures("every_accelerator")

WIDTH = 8


class Encoding(Block):
    """A block with a second method, which runs its children."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up.bias[:WIDTH] + self.down(torch.tanh(self.up(x)))


class Outside(nn.Module):
    """Uses weights of its blocks in every way but their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Encoding(WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.by_name = {"last": self.last, "up": self.blocks[1].up}

    def child(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table(ids))
        return self.blocks[0](x) + self.blocks[2].down(self.blocks[1].up(x))

    def method(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[1].encode(self.table(ids)))

    def parent(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.table(ids), self.last.weight, self.blocks[0].down.bias[:WIDTH])
        return F.linear(self.blocks[0](x) @ self.last.weight.T, self.table.weight)

    def slices(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.table(ids)) + self.table.weight[: len(ids)]
        return torch.cat([x, self.last.weight[:2]]) * (self.last.bias + 1)

    def dictionary(self, ids: torch.Tensor) -> torch.Tensor:
        return self.by_name["up"](self.by_name["last"](self.blocks[0](self.table(ids))))

    def forward(self, ids: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(ids)


WAYS = ["child", "method", "parent", "slices", "dictionary"]


def outside(seed: int = 0) -> Outside:
    torch.manual_seed(seed)
    return Outside().eval()


def ids() -> torch.Tensor:
    return torch.arange(4) * 3 % 11


def placed(model: nn.Module, where: str, folder: Path, **options: Any) -> nn.Module:
    """Return `model`, kept `where`, to run on the first accelerator."""
    return dispatch_model(model, {"": where}, main_device=at(0), offload_dir=folder, **options)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_used_outside_their_block_give_the_bits_of_the_resident_model(
    way: str, where: str, tmp_path: Path
) -> None:
    model = outside()
    resident = copy.deepcopy(model).to(at(0))
    placed(model, where, tmp_path)
    with torch.no_grad():
        expected = resident(ids().to(at(0)), way).cpu()
        for _ in range(2):
            assert torch.equal(model(ids(), way), expected)


@pytest.mark.parametrize("way", WAYS)
def test_weights_used_outside_their_block_get_their_gradients(way: str, tmp_path: Path) -> None:
    model = outside().train()
    resident = copy.deepcopy(model).to(at(0))
    placed(model, "cpu", tmp_path)
    (resident(ids().to(at(0)), way) ** 2).sum().backward()
    (model(ids(), way) ** 2).sum().backward()
    for (name, kept), whole in zip(model.named_parameters(), resident.parameters()):
        assert (kept.grad is None) == (whole.grad is None), name
        if kept.grad is not None and whole.grad is not None:
            assert kept.grad.device.type == "cpu"
            assert torch.allclose(kept.grad, whole.grad.cpu(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("way", WAYS)
def test_another_method_of_the_model_is_an_entry_point(way: str, tmp_path: Path) -> None:
    model = outside()
    resident = copy.deepcopy(model).to(at(0))
    placed(model, "cpu", tmp_path)
    with torch.no_grad():
        expected = getattr(resident, way)(ids().to(at(0)))
        assert torch.equal(getattr(model, way)(ids().to(at(0))).cpu(), expected.cpu())
        assert torch.equal(getattr(model, way)(ids()).cpu(), expected.cpu())


def test_offloaded_weights_stay_the_same_parameters_and_are_plain_again_afterwards(tmp_path: Path) -> None:
    model = outside()
    before = list(model.parameters())
    placed(model, "cpu", tmp_path)
    assert all(now is then and isinstance(now, nn.Parameter) for now, then in zip(model.parameters(), before))
    undispatch(model)
    assert all(now is then and type(now) is nn.Parameter for now, then in zip(model.parameters(), before))


def test_an_offloaded_weight_reads_as_a_plain_tensor(tmp_path: Path) -> None:
    weight = placed(outside(), "cpu", tmp_path).last.weight
    for read in (weight.data, weight.detach(), weight.clone(), weight.to(torch.float64)):
        assert type(read) is torch.Tensor
    assert all(type(value) is torch.Tensor for value in placed(outside(), "cpu", tmp_path).state_dict().values())
    assert type(copy.deepcopy(weight)) is nn.Parameter
    assert "Offloaded" not in repr(weight) + repr(weight * 2)


def test_what_is_computed_from_it_on_the_host_meets_the_accelerator_too(tmp_path: Path) -> None:
    """As the product of adapters that DoRA computes with a matrix on their device, and detaches."""
    weight = placed(outside(), "cpu", tmp_path).last.weight
    x = torch.ones(2, WIDTH).to(at(0))
    product = torch.eye(WIDTH, device=weight.device) @ weight
    for result in (product, product.detach(), nn.Parameter(product * 2), copy.deepcopy(nn.Parameter(product)).data):
        assert result.device.type == "cpu"
    assert torch.equal((x @ product.detach()).cpu(), (x @ weight.detach().to(at(0))).cpu())
    assert isinstance(nn.Parameter(product), nn.Parameter)
    assert type(copy.deepcopy(nn.Parameter(product.detach()))) is nn.Parameter


def test_a_saved_offloaded_weight_loads_as_a_plain_one(tmp_path: Path) -> None:
    weight = placed(outside(), "cpu", tmp_path).last.weight
    file = io.BytesIO()
    torch.save([weight, weight * 2], file)
    file.seek(0)
    parameter, twice = torch.load(file)
    assert (type(parameter), type(twice)) == (nn.Parameter, torch.Tensor)


def test_writes_to_an_offloaded_weight_reach_the_next_forward(tmp_path: Path) -> None:
    model = outside()
    placed(model, "cpu", tmp_path)
    with torch.no_grad():
        model(ids(), "child")
        model.first.weight.mul_(2).add_(torch.ones(WIDTH, device=at(0)))
        model.first.bias[:2] = torch.zeros(2, device=at(0))
        model.last.weight.copy_(torch.ones(WIDTH, WIDTH, device=at(0)))
        assert model.first.weight.device.type == "cpu"
    values = {name: value.clone() for name, value in model.state_dict().items()}
    resident = outside()
    resident.load_state_dict(values)
    resident.to(at(0))
    with torch.no_grad():
        assert torch.equal(model(ids(), "child"), resident(ids().to(at(0)), "child").cpu())


def test_weights_that_are_computed_with_are_recorded_and_those_that_are_read_are_not(tmp_path: Path) -> None:
    model = placed(outside(), "cpu", tmp_path)
    with torch.no_grad(), recorded_uses() as around:
        with recorded_uses() as used:
            torch.ones(WIDTH, device=at(0)) @ model.last.weight
        assert model.first.weight.shape == (WIDTH, WIDTH)
        model.first.weight.detach().sum()
        assert [id(each) for each in used] == [id(model.last.weight)]
        assert [id(each) for each in around] == [id(model.last.weight)]
        _ = model.first.bias[:2]
    assert id(model.first.bias) in {id(each) for each in around}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def by_other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def by_arrays(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            array = parameter.data.numpy()
            array *= 2
        else:
            by_data(nn.ParameterList([parameter]))


def by_detached_arrays(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            array = parameter.detach().numpy()
            array *= 2
        else:
            by_data(nn.ParameterList([parameter]))


def by_arrays_of_rows(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            array = parameter[:1].detach().numpy()
            array *= 2
        else:
            parameter.data[:1].mul_(2)


def by_one_vector(model: nn.Module) -> None:
    twice = 2 * nn.utils.parameters_to_vector(parameter.detach().cpu() for parameter in model.parameters())
    first = next(model.parameters())
    nn.utils.vector_to_parameters(twice.to(first.device), model.parameters())


@pytest.mark.parametrize(
    "write", [by_data, by_other_data, by_arrays, by_detached_arrays, by_arrays_of_rows, by_one_vector]
)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_what_no_version_counter_counts_is_seen_by_the_next_forward(
    write: Callable[[nn.Module], None], place: str, tmp_path: Path
) -> None:
    resident = chain().to(at(0))
    places = {str(index): place for index in range(5)}
    streamed = dispatch_model(chain(), places, main_device=at(0), offload_dir=tmp_path)
    x = torch.randn(2, WIDTH).to(at(0))
    with torch.no_grad():
        streamed(x)
        for model in (resident, streamed):
            write(model)
        assert torch.equal(streamed(x), resident(x))
        assert torch.equal(streamed(x), resident(x))


def in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def by_out(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.mul(parameter, 2, out=parameter)


def several_at_once(model: nn.Module) -> None:
    for is_host in (True, False):
        chosen = [parameter for parameter in model.parameters() if (parameter.device.type == "cpu") == is_host]
        if chosen:
            torch._foreach_mul_(chosen, 2)


def by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def by_loading_from_the_accelerator(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value.to(at(0)) for name, value in model.state_dict().items()})


def by_its_state(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(2)


@pytest.mark.parametrize(
    "write", [in_place, by_out, several_at_once, by_loading, by_loading_from_the_accelerator, by_its_state]
)
def test_what_is_written_after_a_forward_does_not_reach_its_copies(write: Callable[[nn.Module], None]) -> None:
    resident = chain().to(at(0))
    streamed = dispatch_model(chain(), {"": 0, "1": "cpu", "3": "cpu", "4": "cpu"}, main_device=at(0))
    x = torch.randn(2, WIDTH).to(at(0))
    with torch.no_grad():
        for _ in range(2):
            found = streamed(x)
            expected = resident(x)
            for model in (resident, streamed):
                write(model)
            assert torch.equal(found, expected)
        assert torch.equal(streamed(x), resident(x))


@pytest.mark.parametrize("kept", [lambda p: p.detach().numpy(), lambda p: p.data.numpy(), lambda p: p.data])
@pytest.mark.parametrize("offload_dtype", [None, "int8"])
def test_arrays_that_are_kept_are_written_to_between_any_two_forwards(kept: Any, offload_dtype: str | None) -> None:
    written, plain = (
        dispatch_model(chain(), {"": "cpu"}, main_device=at(0), offload_dtype=offload_dtype) for _ in "ab"
    )
    arrays = [kept(parameter) for parameter in written.parameters()]
    x = torch.randn(2, WIDTH).to(at(0))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(written(x), plain(x))
            torch.get_device_module(x.device.type).synchronize()  # copies read what is written now
            for array in arrays:
                array *= 2
            for parameter in plain.parameters():
                parameter.mul_(2)


@pytest.mark.slow
def test_forwards_and_backwards_wait_for_no_copies_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr("bigmodel.dispatch.weights.outside_use.wait_for_copies", lambda: waits.append(None))
    model = dispatch_model(Outside(), {"": 0, "table": "cpu", "blocks": "cpu", "last": "cpu"}, main_device=at(0))
    for _ in range(2):
        for method in ("child", "method", "parent", "slices"):
            getattr(model, method)(torch.arange(3).to(at(0))).sum().backward()
    assert waits == []


def test_what_was_given_out_and_is_gone_is_not_fetched_again() -> None:
    streamed = dispatch_model(chain(), {"": 0, "1": "cpu"}, main_device=at(0))
    x = torch.ones(2, WIDTH).to(at(0))
    with torch.no_grad():
        streamed.state_dict()
        streamed(x)
        fetched = streamed.dispatch_stats()[str(torch.device(at(0)))]["fetches"]
        streamed(x)
    assert streamed.dispatch_stats()[str(torch.device(at(0)))]["fetches"] == fetched


def test_data_of_another_dtype_is_refused_by_the_next_forward() -> None:
    streamed = dispatch_model(chain(), {"": "cpu"}, main_device=at(0))
    streamed[1].weight.data = streamed[1].weight.data.double()
    with pytest.raises(DispatchError, match="'weight' of '1' was removed or replaced by a tensor of another"):
        streamed(torch.ones(2, WIDTH).to(at(0)))


def test_what_is_only_read_is_not_fetched_again() -> None:
    streamed = dispatch_model(chain(), {"": 0, "1": "cpu"}, main_device=at(0))
    x = torch.ones(2, WIDTH).to(at(0))
    with torch.no_grad():
        streamed(x)
        fetched = streamed.dispatch_stats()[str(torch.device(at(0)))]["fetches"]
        assert (streamed[1].weight * 2).sum() == (chain()[1].weight * 2).sum()
        streamed(x)
    assert streamed.dispatch_stats()[str(torch.device(at(0)))]["fetches"] == fetched


def test_nothing_of_it_stays_on_the_parameters_of_an_undispatched_model() -> None:
    streamed = dispatch_model(chain(), {"": "cpu"}, main_device=at(0))
    by_data(streamed)
    plain = undispatch(streamed)
    assert [vars(parameter) for parameter in plain.parameters()] == [{}] * 10
