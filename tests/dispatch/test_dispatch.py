"""Dispatched models on accelerators give what the model that was never dispatched gives, whenever they were made."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import accelerators, max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.dispatch import lasting_tensors
from bigmodel.errors import BudgetError, DeviceError, DeviceMapError, DispatchError, PlanError

from ..accelerators import at, exact, held, two
from .models import Stack, ids, llama, resident_output, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")

TWO_DEVICES = pytest.param({"": 1, "norm": 0}, marks=two)
MAPS: list[Any] = [
    {"": 0},
    pytest.param({"": 0, "blocks.2": 1}, marks=two),
    {"": "cpu"},
    {"": 0, "blocks": "cpu"},
    pytest.param({"": "cpu", "blocks.1": 0, "blocks.3": 1}, marks=two),
    pytest.param(
        {
            "embed": 1,
            "head": 1,
            "scale": 0,
            "used": 0,
            "norm": "cpu",
            "blocks": 0,
            "blocks.1": "cpu",
            "blocks.2": "cpu",
        },
        marks=two,
    ),
    pytest.param({"": 0, "blocks.0.up": "cpu", "blocks.0.down": 1}, marks=two),
    {"": 0, "scale": "cpu", "embed": "cpu"},
]


@pytest.mark.parametrize("device_map", MAPS)
def test_the_output_has_the_bits_of_the_resident_model_and_is_where_the_input_is(device_map: dict[str, object]) -> None:
    model = stack()
    expected = resident_output(model, ids())
    dispatch_model(model, device_map, main_device=at(0))
    for _ in range(3):
        with torch.no_grad():
            # Nothing is attached to a model that lives on one device, so nothing brings its inputs there.
            x = ids().to(at(0)) if device_map == {"": 0} else ids()
            output = model(x)
        assert output.device == x.device
        assert torch.equal(output.cpu(), expected)


@pytest.mark.parametrize("device_map", MAPS)
def test_parameters_are_real_and_readable_before_during_and_after(device_map: dict[str, object]) -> None:
    model = stack()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    dispatch_model(model, device_map, main_device=at(0))
    seen: list[bool] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: seen.append(not any(p.is_meta for p in m.parameters())))
    with torch.no_grad():
        model(ids().to(at(0)))
    assert seen
    assert all(seen)
    assert model.state_dict().keys() == stack().state_dict().keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), values[name]), name


@pytest.mark.parametrize("device_map", MAPS)
def test_undispatch_gives_the_plain_model_back(device_map: dict[str, object]) -> None:
    model, plain = stack(), stack()
    dispatch_model(model, device_map, main_device=at(0))
    with torch.no_grad():
        model(ids().to(at(0)))
    undispatch(model, "cpu")
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert model.head.weight is model.embed.weight
    assert all(m.__dict__.keys() == p.__dict__.keys() for m, p in zip(model.modules(), plain.modules()))
    plain.used += 1
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    assert torch.equal(model(ids()), plain(ids()))
    model.half()
    pickle.loads(pickle.dumps(model))
    gc.collect()
    assert [held(n) for n in range(len(accelerators()))] == [0] * len(accelerators())


def test_a_module_that_lives_where_it_runs_has_nothing_attached() -> None:
    model = dispatch_model(stack(), {"": 0})
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert model.hf_device_map == {"": 0}
    model = dispatch_model(stack(), {"": 0, "blocks.1": "cpu"})
    attached = {name for name, m in model.named_modules() if "forward" in m.__dict__}
    assert attached == {"", "blocks.1"}


def test_on_the_host_nothing_is_attached_at_all() -> None:
    model = dispatch_model(stack(), {"": "cpu"})
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model(ids()), stack()(ids()))


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_forward_that_raises_leaves_weights_and_memory_as_they_were(fail_at: int) -> None:
    model = dispatch_model(stack(), {"": 0, "blocks": "cpu"})
    expected = model(ids()).detach()
    before = held(0)
    devices = [p.device for p in model.parameters()]
    for _ in range(3):
        with pytest.raises(ValueError, match="asked to fail"), torch.no_grad():
            model(ids(), fail_at=fail_at)
    gc.collect()
    assert [p.device for p in model.parameters()] == devices
    assert held(0) == before
    assert torch.equal(model(ids()), expected)


@exact
def test_running_out_of_memory_in_forward_leaves_the_model_usable() -> None:
    model = dispatch_model(stack(), {"": 0, "blocks": "cpu"})
    expected = model(ids()).detach()
    before = held(0)
    virtual.configure(0, before + 100)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(ids())
    virtual.configure(0, None)
    gc.collect()
    assert held(0) == before
    assert torch.equal(model(ids()), expected)


@pytest.mark.slow
def test_threads_may_share_a_dispatched_model() -> None:
    model = llama()
    tokens = torch.arange(12).view(2, 6)
    expected = copy.deepcopy(model).to(at(0))(tokens.to(at(0))).logits.detach().cpu()
    dispatch_model(model, {"": "cpu", "model.layers.1": 0}, main_device=at(0))
    wrong: list[object] = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                if not torch.equal(model(tokens).logits, expected):
                    wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive()
    assert wrong == []
    assert all(p.device.type == "cpu" for name, p in model.named_parameters() if "layers.1" not in name)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": 0, "norm": "cpu"}, pytest.param({"": 1, "norm": 0}, marks=two)]
)
def test_state_written_in_forward_stays(device_map: dict[str, object], offload_buffers: bool) -> None:
    plain, model = stack().train(), stack().train()
    dispatch_model(model, device_map, main_device=at(0), offload_buffers=offload_buffers)
    with torch.no_grad():
        for _ in range(3):
            model(ids())
            plain(ids())
    assert model.used.item() == 3
    assert model.norm.num_batches_tracked.item() == 3
    torch.testing.assert_close(model.norm.running_mean.cpu(), plain.norm.running_mean)


def test_offloaded_buffers_live_on_the_host_when_asked() -> None:
    model = dispatch_model(stack(), {"": 0, "norm": "cpu"}, offload_buffers=True)
    assert model.norm.running_mean.device.type == "cpu"
    model = dispatch_model(stack(), {"": 0, "norm": "cpu"})
    assert str(model.norm.running_mean.device) == at(0)


@exact
def test_an_offloaded_embedding_is_looked_up_where_it_lies() -> None:
    model = dispatch_model(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8)), {"0": "cpu", "1": 0})
    virtual.link(0).bytes_to_device = 0
    model(torch.tensor([[1, 2]]))
    rows, indices = 2 * 8 * 4, 2 * 8
    assert virtual.link(0).bytes_to_device == rows + indices


@exact
def test_budgets_hold_and_device_memory_is_slots_and_residents() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)))
    block = sum(p.nbytes for p in model[0].parameters())
    dispatch_model(model, "auto", max_memory={0: 5 * block, "cpu": "1GiB"})
    reset_peak_memory(0)
    with torch.no_grad():
        model(torch.randn(1, 64))
    assert "cpu" in model.hf_device_map.values()
    assert 0 in model.hf_device_map.values()
    assert max_memory_allocated(0) <= 5 * block


def test_a_model_that_cannot_fit_says_by_how_much() -> None:
    with pytest.raises(BudgetError, match=r"bytes|KiB|MiB|B"):
        dispatch_model(stack(), "auto", max_memory={0: 10, "cpu": 10, "disk": 0})


def test_moving_casting_and_pickling_a_dispatched_model_are_refused() -> None:
    model = dispatch_model(stack(), {"": "cpu"}, main_device=0)
    for attempt in (
        lambda: model.to("meta"),
        lambda: model.to("cpu", torch.float64),
        lambda: model.half(),
        lambda: model.blocks[0].double(),
        lambda: pickle.dumps(model),
    ):
        with pytest.raises(DispatchError, match="undispatch"):
            attempt()
    assert torch.equal(undispatch(model)(ids()), stack()(ids()))


def test_moving_a_dispatched_model_to_the_device_that_it_is_on_does_nothing() -> None:
    model = dispatch_model(stack(), {"": "cpu"}, main_device=at(0))
    before = [(parameter, parameter.device) for parameter in model.parameters()]
    for device in (at(0), model.embed.weight.device, torch.float32):
        assert model.to(device) is model
        assert model.blocks[0].to(device) is model.blocks[0]
    assert all(now is then and now.device == place for now, (then, place) in zip(model.parameters(), before))


@two
def test_dispatching_again_replaces_the_first_dispatch() -> None:
    model = dispatch_model(stack(), {"": "cpu"}, main_device=0)
    dispatch_model(model, {"": 0, "blocks": 1})
    assert torch.equal(model(ids()).detach(), resident_output(stack(), ids()))
    assert str(model.blocks[0].up.weight.device) == at(1)


@exact
@pytest.mark.parametrize("capacity", [1, 700, 1500])
def test_a_device_without_room_for_the_slots_leaves_the_model_as_it_was(capacity: int) -> None:
    model = stack()
    weights = list(model.parameters())
    virtual.configure(0, capacity)
    with pytest.raises(torch.OutOfMemoryError):
        dispatch_model(model, {"": 0, "blocks": "cpu"})
    assert not hasattr(model, "hf_device_map")
    assert [ours is before for ours, before in zip(model.parameters(), weights)] == [True] * len(weights)
    assert held(0) == 0
    virtual.configure(0)
    assert torch.equal(dispatch_model(model, {"": 0, "blocks": "cpu"})(ids()).detach(), resident_output(stack(), ids()))


@two
@exact
def test_a_failed_dispatch_leaves_the_model_as_it_was() -> None:
    model = stack()
    virtual.configure(1, 300)
    with pytest.raises(torch.OutOfMemoryError):
        dispatch_model(model, {"": 0, "blocks": 1})
    assert not hasattr(model, "hf_device_map")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(ids()), stack()(ids()))
    gc.collect()
    assert [held(n) for n in range(len(accelerators()))] == [0] * len(accelerators())


def test_a_map_that_does_not_cover_the_model_is_refused() -> None:
    with pytest.raises(DeviceMapError):
        dispatch_model(stack(), {"blocks": 0})


@two
def test_a_module_torn_between_two_devices_is_refused() -> None:
    model = stack()
    with pytest.raises(DeviceMapError, match=r"norm\.weight run on \w+:0 and norm\.bias on \w+:1.*'norm' whole"):
        dispatch_model(model, {"": 0, "norm.bias": 1})
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_bias_on_the_host_beside_a_weight_on_the_device_is_streamed() -> None:
    model = dispatch_model(stack(), {"": 0, "norm.bias": "cpu", "blocks.1.up.bias": "cpu"})
    assert torch.equal(model(ids()).detach(), resident_output(stack(), ids()))
    assert model.norm.bias.device.type == "cpu"


def test_meta_is_no_place_for_weights() -> None:
    model = stack()
    with pytest.raises(DeviceError, match="'meta' is not present"):
        dispatch_model(model, {"": "meta"})
    assert torch.equal(model(ids()), stack()(ids()))


def test_what_is_no_module_is_refused_with_its_type() -> None:
    with pytest.raises(PlanError, match=r"model is .stack."):
        dispatch_model("stack")  # type: ignore[arg-type]


@pytest.mark.parametrize("device_map", ["auto", "balanced", "cpu", 0])
def test_a_model_without_weights_stays_as_it_is(device_map: Any) -> None:
    model = dispatch_model(nn.Sequential(nn.Identity(), nn.ReLU()), device_map)
    assert torch.equal(model(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_weights_without_values_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(DispatchError, match="scale"):
        dispatch_model(model, {"": "cpu"})


@pytest.mark.slow
@two
def test_the_signature_and_the_generation_of_the_model_stay() -> None:
    plain, model = llama(), llama()
    tokens = torch.arange(6).view(1, 6)
    with torch.no_grad():
        expected = plain.to(at(0)).generate(tokens.to(at(0)), max_new_tokens=8, do_sample=False).cpu()
    dispatch_model(model, {"": "cpu", "model.layers.2": 1}, main_device=0)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)


@two
@pytest.mark.parametrize("strict", [False, True])
def test_nothing_is_left_when_the_model_is_deleted(strict: bool) -> None:
    if at(0).startswith("virtual"):
        virtual.enable(count=2, strict=strict)
    before = set(threading.enumerate())
    model = dispatch_model(stack(width=128), {"": "cpu", "blocks.1": 1}, main_device=0)
    model(ids())
    threads = [t for t in threading.enumerate() if t not in before and t.name.startswith("copy to")]
    assert threads or at(0).startswith("cuda") or strict
    del model
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert [held(n) for n in range(len(accelerators()))] == [0] * len(accelerators())


devices = st.sampled_from([0, 1, "cpu"])


@pytest.mark.slow
@two
@given(data=st.data())
def test_every_placement_gives_the_same_bits(data: st.DataObject) -> None:
    names = ["embed", "head", "scale", "norm", *(f"blocks.{n}" for n in range(4))]
    device_map = {name: data.draw(devices, label=name) for name in names}
    device_map["used"] = device_map["scale"]
    for inside in data.draw(st.lists(st.sampled_from(["blocks.1.up", "blocks.2.down"]), unique=True)):
        device_map[inside] = data.draw(devices, label=inside)
    model = stack()
    expected = resident_output(model, ids())
    dispatch_model(model, device_map, main_device=data.draw(st.sampled_from([0, 1]), label="main"))
    alone = set(device_map.values())
    x = ids().to(at(alone.pop())) if len(alone) == 1 and "cpu" not in alone else ids()
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)


@pytest.mark.parametrize("device_map", MAPS[1:])
def test_inference_mode_changes_nothing(device_map: dict[str, object]) -> None:
    model = dispatch_model(stack(), device_map, main_device=at(0))
    with torch.inference_mode():
        first = model(ids()).cpu()
        assert torch.equal(model(ids()).cpu(), first)
    with torch.no_grad():
        assert torch.equal(model(ids()).cpu(), first)
    assert torch.equal(first, resident_output(stack(), ids()))
    if 1 not in device_map.values():  # autograd knows only the first virtual accelerator
        model(ids()).sum().backward()
        assert model.blocks[1].up.weight.grad is not None


def four_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))


@exact
def test_a_model_that_is_dispatched_in_inference_mode_runs_and_trains_outside_of_it() -> None:
    x = torch.ones(2, 128)
    expected = resident_output(four_layers(), x)
    model = four_layers()
    with torch.inference_mode():
        dispatch_model(model, {"": "cpu"}, main_device=0)
        model(x)
    assert torch.equal(model(x).detach(), expected)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@exact
def test_a_model_that_was_made_in_inference_mode_runs() -> None:
    x = torch.ones(2, 128)
    expected = resident_output(four_layers(), x)
    with torch.inference_mode():
        model = dispatch_model(four_layers(), {"": "cpu"}, main_device=0)
        assert torch.equal(model(x), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@exact
@pytest.mark.parametrize("device", ["meta", "virtual:0"])
def test_a_default_device_is_not_where_host_weights_go(device: str, tmp_path: Path) -> None:
    x = torch.ones(2, 128)
    expected = resident_output(four_layers(), x)
    for device_map in ({"": "cpu"}, {"": "cpu", "2": "disk"}):
        model = four_layers()
        with torch.device(device):
            dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
            assert [str(p.device) for p in model.parameters()] == ["cpu"] * 8
            assert torch.equal(model(x).detach(), expected)


def test_a_lazy_module_is_to_run_once_before() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(DispatchError, match=r"0\.weight belongs to a lazy module and has no shape yet"):
        dispatch_model(model, {"": "cpu"})


@exact
def test_a_table_that_returns_a_part_of_itself_is_right_after_later_blocks_came() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 8))

        def forward(self, length: int) -> torch.Tensor:
            return self.weight[:length]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layers = Table(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = self.positions(x.shape[0])
            for layer in self.layers:
                x = layer(x)
            return x + positions

    torch.manual_seed(0)
    model, x = Model(), torch.ones(3, 8)
    expected = resident_output(model, x)
    dispatch_model(model, {"": "cpu"}, main_device=0)
    for _ in range(2):
        assert torch.equal(model(x).detach(), expected)


def test_neither_inference_mode_nor_a_default_device_counts() -> None:
    with torch.inference_mode(), torch.device("meta"):
        with lasting_tensors():
            made = torch.zeros(2)
        assert torch.zeros(2).is_meta, "the caller's are back afterwards"
    assert (str(made.device), made.is_inference()) == ("cpu", False)
    made.add_(1)


def test_a_device_that_is_named_counts() -> None:
    with lasting_tensors():
        assert torch.zeros(2, device="meta").is_meta


class Projection(nn.Module):
    """Multiplies by a weight that is no `nn.Linear`'s, and keeps the flags that it was called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width), requires_grad=False)
        self.flags: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flags.append((self.weight.requires_grad, self.bias.requires_grad))
        return torch.matmul(x, self.weight) + self.bias


@pytest.mark.parametrize("inference", [False, True])
def test_streamed_weights_require_gradients_as_resident_ones_do(inference: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Projection(48) for _ in range(3))).eval()
    x = torch.randn(2, 7, 48)
    dispatch_model(whole := copy.deepcopy(model), {"": 0})
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with torch.inference_mode(inference), torch.no_grad():
        assert torch.equal(model(x), whole(x.to(at(0))).cpu())
        for part in model:
            part.weight.requires_grad_(False)
            part.bias.requires_grad_()
        model(x)
    assert [part.flags for part in model] == [[(True, False), (False, True)]] * 3
