"""A virtual accelerator behaves as a real one does, and computes what the CPU computes."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.devices.virtual.traits import traits_of
from tests.preloaded import run

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:1"


def test_tensors_are_made_there_and_come_back() -> None:
    values = torch.arange(6.0).view(2, 3)
    there = values.to(DEVICE)
    assert str(there.device) == DEVICE
    assert there.shape == (2, 3)
    assert torch.equal(there.cpu(), values)
    assert repr(there).endswith("device='virtual:1')")


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.full((4,), 7, device=d),
        lambda d: torch.arange(1, 9, 2, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tensor([1.5, 2.5], device=d),
        lambda d: torch.ones(3, device=d).new_zeros(2),
        lambda d: torch.empty_like(torch.ones(2, 2, device=d)).fill_(3),
        lambda d: torch.tril(torch.ones(3, 3, device=d)),
    ],
)
def test_factories_make_what_they_make_on_the_cpu(make) -> None:  # type: ignore[no-untyped-def]
    there = make(DEVICE)
    assert str(there.device) == DEVICE
    assert torch.equal(there.cpu(), make("cpu"))


def test_layers_compute_the_bits_of_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1)).eval()
    x = torch.randn(3, 8)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model).to(DEVICE)(x.to(DEVICE)).cpu(), expected)


def test_devices_do_not_mix() -> None:
    a, b = torch.ones(2, device="virtual:0"), torch.ones(2, device="virtual:1")
    with pytest.raises(RuntimeError, match="virtual:0 and virtual:1"):
        a + b
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(2)
    assert torch.equal((a + torch.tensor(1.0)).cpu(), torch.full((2,), 2.0))


def test_lists_may_hold_tensors_of_several_devices() -> None:
    """As on CUDA, where ATen goes through such lists tensor by tensor; each pair must not mix devices still."""
    ones = [torch.ones(2, device="virtual:0"), torch.ones(2, device="virtual:1"), torch.ones(2)]
    zeros = [torch.zeros(2), torch.zeros(2, device="virtual:0"), torch.zeros(2, device="virtual:1")]
    torch._foreach_copy_(zeros, ones)
    torch._foreach_mul_(zeros, 3)
    assert [str(each.device) for each in zeros] == ["cpu", "virtual:0", "virtual:1"]
    assert [each.tolist() for each in zeros] == [[3.0, 3.0]] * 3
    assert [each.tolist() for each in torch._foreach_add(ones, 1)] == [[2.0, 2.0]] * 3
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add_(zeros, ones)


def test_views_and_in_place_operations_share_memory() -> None:
    base = torch.zeros(8, device=DEVICE)
    base[2:4] = 5
    base.view(2, 4)[1].add_(1)
    assert base.cpu().tolist() == [0, 0, 5, 5, 1, 1, 1, 1]
    assert memory_allocated(DEVICE) == base.nbytes


def test_a_byte_buffer_is_viewed_as_tensors_of_other_types() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    view = buffer[16:32].view(torch.float32).view(2, 2)
    view.copy_(torch.ones(2, 2))
    assert buffer.cpu()[16:32].view(torch.float32).tolist() == [1, 1, 1, 1]
    assert memory_allocated(DEVICE) == 64


def test_memory_is_counted_and_given_back() -> None:
    x = torch.zeros(1000, dtype=torch.uint8, device=DEVICE)
    y = x.clone()
    assert memory_allocated(DEVICE) == 2000
    del y
    assert memory_allocated(DEVICE) == 1000
    del x
    gc.collect()
    assert memory_allocated(DEVICE) == 0


def test_past_the_capacity_there_is_no_memory_and_nothing_is_lost() -> None:
    virtual.configure(1, 1000)
    kept = torch.ones(600, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual:1 out of memory"):
        kept.clone()
    assert memory_allocated(DEVICE) == 600
    assert kept.sum().item() == 600


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="virtual:9 does not exist"):
        torch.ones(1, device="virtual:9")


def test_gradients_flow_on_the_first_device() -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    layer(x).square().sum().backward()
    there = copy.deepcopy(layer).to("virtual:0")
    there.zero_grad()
    there(x.to("virtual:0")).square().sum().backward()
    assert torch.equal(there.weight.grad.cpu(), layer.weight.grad)


def test_a_parameter_stays_a_parameter() -> None:
    layer = nn.Linear(2, 2).to(DEVICE)
    assert isinstance(layer.weight, nn.Parameter)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert isinstance(copy.deepcopy(layer).weight, nn.Parameter)


def test_a_parameter_is_copied_by_calling_its_type() -> None:
    weight = nn.Linear(2, 2).to(DEVICE).weight
    copied = type(weight)(weight.detach().to("meta"), requires_grad=False)
    assert isinstance(copied, nn.Parameter)
    assert (copied.device.type, copied.requires_grad) == ("meta", False)
    assert isinstance(type(weight)(weight.detach()), nn.Parameter)


def test_tied_parameters_stay_tied_when_a_module_moves() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model.to(DEVICE)
    assert model[1].weight is model[0].weight
    assert str(model[1].weight.device) == DEVICE


@pytest.mark.parametrize(
    "move", [lambda t: t.to("meta"), lambda t: t.to(device=torch.device("meta"), dtype=torch.half)]
)
def test_nothing_crosses_the_link_to_meta(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = torch.ones(1000, device=DEVICE)
    before = virtual.link(0).bytes_to_host
    moved = move(tensor)
    assert (moved.device.type, moved.shape) == ("meta", tensor.shape)
    assert virtual.link(0).bytes_to_host == before


def test_views_work_in_inference_mode() -> None:
    weight = torch.arange(6.0).view(2, 3).to(DEVICE)
    with torch.inference_mode():
        view = weight[1:].view(3)
        product = nn.functional.linear(torch.ones(1, 3, device=DEVICE), weight)
        assert not view.is_inference()
        assert product.is_inference()
        assert view.cpu().tolist() == [3, 4, 5]
        assert product[0].cpu().tolist() == [3, 12]


def test_a_view_of_another_dtype_made_in_inference_mode_has_no_version_counter() -> None:
    """As on other devices."""
    for device in ("cpu", DEVICE):
        held = torch.zeros(8, dtype=torch.uint8, device=device)
        with torch.inference_mode():
            view = held.view(torch.float32)
            view.add_(1)
        assert view.is_inference()
        assert held._version == 0
        assert held.view(torch.float32).tolist() == [1, 1]


def test_a_dropout_that_drops_nothing_takes_no_memory_in_inference_mode() -> None:
    x = torch.ones(1000).to(DEVICE)
    before = memory_allocated(DEVICE)
    with torch.inference_mode():
        same = nn.functional.dropout(x, 0.5, training=False)
    assert memory_allocated(DEVICE) == before
    assert same is x


def test_operations_that_are_composed_of_others_take_the_memory_of_their_kernels_in_inference_mode() -> None:
    """PyTorch has a decomposition of bicubic interpolation in Python too, with a temporary tensor for each corner."""
    x = torch.ones(1, 4, 8, 8).to(DEVICE)
    reset_peak_memory(DEVICE)
    before = memory_allocated(DEVICE)
    with torch.inference_mode():
        larger = nn.functional.interpolate(x, size=(16, 16), mode="bicubic")
    assert max_memory_allocated(DEVICE) - before == larger.nbytes


def test_tensors_move_in_inference_mode() -> None:
    with torch.inference_mode():
        there = torch.ones(2).to("virtual:0").to(DEVICE)
        assert str(there.device) == DEVICE
        assert there.half().to("cpu", torch.float64).tolist() == [1, 1]


def test_elements_are_given_as_numbers() -> None:
    there = torch.arange(4.0, device=DEVICE, requires_grad=True)
    assert there.view(2, 2).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert (there.sum().tolist(), there.sum().item()) == (6.0, 6.0)


_LATE = """
import threading, torch
x = torch.ones(3, requires_grad=True)
x.square().sum().backward()
from bigmodel.devices import virtual
virtual.enable(count=2)

def train(index):
    model = torch.nn.Linear(3, 1).to(f"virtual:{index}")
    with torch.inference_mode():
        model(torch.ones(1, 3, device=f"virtual:{index}"))
    model(torch.full((2, 3), 5.0, device=f"virtual:{index}")).cpu().sum().backward()
    print(model.weight.grad.tolist(), model.weight.grad.device)

for index in (0, 1):
    train(index)
    thread = threading.Thread(target=train, args=(index,))
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_gradients_are_computed_also_on_a_device_that_came_after_a_first_backward_pass() -> None:
    done = run(["-c", _LATE])
    assert done.stdout.splitlines() == [f"[[10.0, 10.0, 10.0]] virtual:{index}" for index in (0, 0, 1, 1)], done.stderr


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.clone])
def test_other_elements_may_be_put_in_the_place_of_a_tensor_s_own(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.zeros(3, device=DEVICE))
    tensor.data = torch.ones(5, device=DEVICE)
    gc.collect()
    assert memory_allocated(DEVICE) == 20
    assert tensor.tolist() == tensor.data.tolist() == [1.0] * 5
    tensor.data.mul_(2)
    assert tensor.cpu().tolist() == [2.0] * 5


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"count": -1}, "count -1"),
        ({"count": 1, "bandwidth": -5.0}, "bandwidth -5"),
        ({"count": 1, "latency": -1.0}, "latency -1"),
        ({"count": 2, "capacity": [1]}, "1 capacities were given for 2"),
        ({"count": 2, "capacity": ["1GiB", "much"]}, "'much' cannot be read"),
    ],
)
def test_impossible_settings_change_nothing(given: dict[str, Any], error: str) -> None:
    virtual.enable(count=3, capacity=100)
    with pytest.raises(ValueError, match=error):
        virtual.enable(**given)
    assert [arena.capacity for arena in virtual.board.arenas] == [100] * 3
    with pytest.raises(RuntimeError, match="virtual:3 does not exist"):
        virtual.link(3)


def test_a_number_is_formatted_as_one() -> None:
    assert (
        f"expert_{torch.tensor(3, device='virtual:0')}, {torch.tensor(0.5, device='virtual:0'):.2f}" == "expert_3, 0.50"
    )


def test_operations_in_place_may_change_the_shape() -> None:
    values = torch.arange(6.0).view(1, 2, 3)
    for change in (
        lambda t: t.squeeze_(0),
        lambda t: t.unsqueeze_(1),
        lambda t: t.transpose_(1, 2),
        lambda t: t.resize_(2, 2),
        lambda t: t.squeeze_(0).t_().mul_(2),
    ):
        expected = change(values.clone())
        there = values.to(DEVICE)
        found = change(there)
        assert found is there
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert torch.equal(found.cpu(), expected)
    there = values.to(DEVICE).requires_grad_()
    (there * 2).squeeze_(0).t_().pow(2).sum().backward()
    assert torch.equal(there.grad.cpu(), values * 8)  # type: ignore[union-attr]


def test_conjugated_tensors_keep_their_sign_in_gradients() -> None:
    def gradient(device: str) -> torch.Tensor:
        values = torch.linspace(-1, 1, 6).to(device).requires_grad_()
        (torch.fft.ihfft(values).conj() * torch.fft.fft(values)[:4]).imag.pow(2).sum().backward()
        assert values.grad is not None
        return values.grad.cpu()

    torch.testing.assert_close(gradient(DEVICE), gradient("cpu"))
    there = torch.ones(2, dtype=torch.complex64).to(DEVICE).conj()
    assert there.is_conj()
    assert there.imag.is_neg()


@pytest.mark.virtual_only("CUDA has sparse and nested tensors")
def test_operations_that_conjugate_in_between_compute_what_the_cpu_computes() -> None:
    values = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.linalg.pinv(values.to(DEVICE)).cpu(), torch.linalg.pinv(values))


def test_sparse_and_nested_tensors_are_refused_before_anything_runs() -> None:
    ids = torch.tensor([1, 2], device=DEVICE)
    for refused in (
        lambda: nn.Embedding(4, 2, sparse=True).to(DEVICE)(ids),
        lambda: nn.EmbeddingBag(4, 2, mode="sum", sparse=True).to(DEVICE)(ids.view(1, 2)),
        lambda: torch.gather(torch.ones(3, device=DEVICE, requires_grad=True), 0, ids, sparse_grad=True),
        lambda: torch.eye(2, device=DEVICE).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr().to(DEVICE),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with torch.no_grad():
        assert nn.Embedding(4, 2, sparse=True).to(DEVICE)(ids).shape == (2, 2)


@pytest.mark.virtual_only("it replaces a kernel of the virtual accelerator")
def test_an_operation_that_fails_in_the_engine_fails_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(traits_of(torch.ops.aten.threshold_backward.default), "kernel", failing)
    values = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match="no kernel"):
        values.exp().relu().sum().backward()
    monkeypatch.undo()
    values.exp().relu().sum().backward()
    assert values.grad is not None


def test_numbers_on_a_device_make_a_tensor(accelerators: None) -> None:
    number = torch.tensor(3.0, device="virtual:0")
    assert torch.tensor([number, number + 1], device="virtual:0").tolist() == [3.0, 4.0]


def test_a_tensor_that_takes_over_the_memory_of_another_keeps_it() -> None:
    """Else it would read what has been freed, and given to others."""
    tensor, other = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    tensor.set_(other)
    del other
    assert tensor.tolist() == [1, 1, 1, 1]
    assert torch.get_device_module("virtual").memory_allocated(1) == 16


def test_memory_of_deep_copies_is_counted() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).to("virtual:0")
    model[1].weight = model[0].weight
    model[0].register_buffer("part", model[0].weight.detach()[:2])
    before = memory_allocated(0)
    copied = copy.deepcopy(model)
    assert copied[1].weight is copied[0].weight
    assert copied[0].part.held.data_ptr() == copied[0].weight.held.data_ptr()  # type: ignore[union-attr, operator]
    assert memory_allocated(0) == before + 16 * 16 * 4
    del copied
    assert memory_allocated(0) == before


CHANGES_OF_METADATA: dict[str, Callable[[torch.Tensor], object]] = {
    "other place": lambda values: values.as_strided_((4,), (1,), 4),
    "other strides": lambda values: values.as_strided_((4,), (2,), 0),
    "fewer elements": lambda values: values.resize_(2),
    "more elements": lambda values: values.resize_(16),
    "other memory": lambda values: values.set_(torch.zeros(4, device="virtual:0")),  # type: ignore[call-overload]
    "other data": lambda values: setattr(values, "data", torch.zeros(2, device="virtual:0")),
}


@pytest.mark.parametrize("change", CHANGES_OF_METADATA)
def test_the_bytes_that_a_tensor_spans_are_those_after_a_change(change: str) -> None:
    values = torch.zeros(8, device="virtual:0")[:4]
    assert isinstance(values, virtual.VirtualTensor)
    assert values.span == (0, 16)
    CHANGES_OF_METADATA[change](values)
    begin = values.held.untyped_storage().data_ptr()
    addresses = [values.held[index].data_ptr() - begin for index in range(len(values))]
    assert values.span == (min(addresses), max(addresses) + 4)
