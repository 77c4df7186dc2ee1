from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bigmodel import dispatch_model, send_to_device
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.devices.nested import iter_tensors
from bigmodel.profile import Profile, profile_model, profile_units
from bigmodel.profile.trace.equal_modules import find_layer_samples
from bigmodel.profile.trace.events import Allocate, Call
from bigmodel.profile.trace.recorder import Recorder
from bigmodel.profile.trace.session import ConstantsThroughHost, Session, caches_of, fake_clone, without_cached_results
from bigmodel.profile.trace.workload import Workload

from ...accelerators import exact
from ...examples import alike
from ..models import Stack

CPU = torch.device("cpu")


class Model(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, dtype=torch.bfloat16))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.called = {"ids": ids, "mask": mask}
        return ids + 1


@pytest.fixture
def session() -> Iterator[Session]:
    recorder = Recorder(iter([]))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield Session(Model(), recorder, Workload(batch_size=2, context_length=5), CPU)


def test_inputs_are_fake_and_have_the_planned_batch_size(session: Session) -> None:
    for tensor, shape, dtype in (
        (session.tokens(4), (2, 4), torch.long),
        (session.ids(7), (7,), torch.long),
        (session.fake(torch.empty(2, 3, 8, device="meta"), session.dtype), (2, 3, 8), torch.bfloat16),
    ):
        assert isinstance(tensor, FakeTensor)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)


def test_samples_are_not_cast_to_eight_bits(session: Session) -> None:
    session.model.weight = nn.Parameter(torch.empty(3, dtype=torch.float8_e4m3fn), requires_grad=False)
    assert session.fake(torch.empty(2, device="meta"), session.dtype).dtype == torch.float32
    session.model.scale = nn.Parameter(torch.empty((), dtype=torch.bfloat16))
    assert session.fake(torch.empty(2, device="meta"), session.dtype).dtype == torch.bfloat16


def test_a_fake_example_has_the_structure_of_the_original(session: Session) -> None:
    fake = session.fake({"a": [torch.ones(2, 3, dtype=torch.int8), "text"], "b": 1.5})
    assert (fake["a"][1], fake["b"]) == ("text", 1.5)
    assert isinstance(fake["a"][0], FakeTensor)
    assert (tuple(fake["a"][0].shape), fake["a"][0].dtype) == ((2, 3), torch.int8)


def test_the_model_gets_only_inputs_that_it_accepts(session: Session) -> None:
    ids = session.tokens(1)
    session.call(ids=ids, mask=None, position_ids=ids)
    assert session.model.called == {"ids": ids, "mask": None}


def test_a_phase_has_the_events_recorded_in_it(session: Session) -> None:
    ids = session.tokens(1)
    assert session.phase("prefill", 4, lambda: "returned") == "returned"
    session.forward(1, ids=ids)
    (first, (begin, end), tokens), (second, (begun, ended), one) = session.marks
    assert (first, tokens, end - begin) == ("prefill", 4, 0)
    assert (second, one, begun) == ("forward", 1, end)
    assert ended > begun


def test_generate_passes_fresh_and_kept_inputs() -> None:
    recorder = Recorder(iter([]))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        session = Session(Model(), recorder, Workload(batch_size=2), CPU)
        ids, mask, unread = session.tokens(4), session.tokens(3), session.tokens(1)
        session.generate_with(kept=[mask], unread=[unread], ids=ids, mask=mask)
    (call,) = [event for event in recorder.events if isinstance(event, Call)]
    assert call.fresh == ((recorder.number_of(ids), 2 * 4 * 8),)
    assert call.kept == ((recorder.number_of(mask), 2 * 3 * 8), (recorder.number_of(unread), 2 * 1 * 8))


def test_generate_keeps_tensors_within_its_inputs() -> None:
    recorder = Recorder(iter([]))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        session = Session(Model(), recorder, Workload(batch_size=2), CPU)
        encoded, ids = {"hidden": session.tokens(3)}, session.tokens(4)
        session.generate_with(kept=[encoded["hidden"]], ids=ids, mask=encoded)
    (call,) = [event for event in recorder.events if isinstance(event, Call)]
    assert call.fresh == ((recorder.number_of(ids), 2 * 4 * 8),)
    assert call.kept == ((recorder.number_of(encoded["hidden"]), 2 * 3 * 8),)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_constants_for_a_device_are_fake_too(make: object) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), ConstantsThroughHost():
        constant = make([1.5, 2.5], device="virtual:0")  # type: ignore[operator]
    assert isinstance(constant, FakeTensor)
    assert (str(constant.device), tuple(constant.shape), constant.dtype) == ("virtual:0", (2,), torch.float32)


def test_a_tensor_that_is_on_its_device_is_not_copied_there() -> None:
    recorder = Recorder(iter([]))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, ConstantsThroughHost():
        made = torch.zeros(3)
        assert torch.as_tensor(made, device="cpu") is made
    assert len([event for event in recorder.events if isinstance(event, Allocate)]) == 1


def test_a_clone_is_fake_and_tied_and_the_model_is_unchanged() -> None:
    model = Stack(tied=True).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mode = FakeTensorMode()
    clone = fake_clone(model, mode, torch.device("cpu"), {})
    assert all(isinstance(parameter, FakeTensor) for parameter in clone.parameters())
    assert clone.head.weight is clone.embed.weight
    assert not clone.training
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_clone_takes_the_dtypes_it_will_be_loaded_as() -> None:
    model = nn.Linear(2, 2)
    clone = fake_clone(model, FakeTensorMode(), torch.device("cpu"), {id(model.weight): torch.float16})
    assert (clone.weight.dtype, clone.bias.dtype) == (torch.float16, torch.float32)


def test_long_lists_of_blocks_are_cut() -> None:
    model = Stack(depth=9)
    units = profile_units(model)
    (sample,) = find_layer_samples(model, units)
    assert sample.path == "blocks"
    assert [units[index].name for index in sample.units] == [f"blocks.{index}" for index in range(9)]
    clone = fake_clone(model, FakeTensorMode(), torch.device("cpu"), {}, [sample])
    assert len(clone.blocks) == sample.count < 9
    assert len(model.blocks) == 9


@lru_cache(maxsize=4)
def positions(count: int) -> torch.Tensor:
    return torch.arange(count).float()


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    cached = lru_cache(maxsize=4)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


class Positioned(nn.Linear):
    """Adds positions that two functions compute once for each length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + positions(x.shape[-1]) + self.shift(x.shape[-1])

    @staticmethod
    @wrapped
    def shift(count: int) -> torch.Tensor:
        return torch.ones(count)


def test_a_forward_after_a_dry_run_computes_with_real_tensors() -> None:
    model, x = Positioned(8, 8), torch.ones(2, 8)
    profile_model(model, sample_inputs=(x,))
    assert not isinstance(positions(8), FakeTensor)
    assert not isinstance(model(x), FakeTensor)


def test_what_a_forward_has_computed_before_is_allocated_in_the_dry_run() -> None:
    model, x = Positioned(8, 8), torch.ones(2, 8)
    first = profile_model(model, sample_inputs=(x,)).activations
    model(x)
    assert profile_model(model, sample_inputs=(x,)).activations == first


def test_caches_of_the_files_of_a_models_classes_are_cleared() -> None:
    model = nn.Sequential(Positioned(8, 8))
    model(torch.ones(2, 8))
    assert len(list(caches_of(model))) == 2
    with without_cached_results(model):
        assert [cache.cache_info().currsize for cache in caches_of(model)] == [0, 0]


WIDTH, ROWS = 8, 64


class Bringing(nn.Module):
    """Brings its input to the device of its first weight, and keeps it there until it returns, as encoders of sounds
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device=self.first.weight.device, dtype=self.first.weight.dtype)
        found: torch.Tensor = self.second(self.first(x))
        return found


def brought(model: nn.Module) -> list[str]:
    """Return the units whose weights' devices tensors are brought to."""
    profile = profiled(model)
    events = profile.phases[0].trace.events
    units = [event.brought_to for event in events if isinstance(event, Allocate) and event.brought_to is not None]
    return [profile.units[unit].name for unit in units]


def profiled(model: nn.Module) -> Profile:
    return profile_model(model, sample_inputs=(torch.ones(ROWS, WIDTH),), device_type="virtual")


@exact
def test_a_tensor_is_brought_to_the_device_of_a_weight() -> None:
    assert brought(Bringing()) == ["first"]


@exact
def test_a_tensor_that_is_brought_to_the_device_of_another_is_not() -> None:
    class Following(Bringing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to(self.first(x).device)
            found: torch.Tensor = self.second(y.to((y + self.second.bias).device))
            return found

    assert brought(Following()) == []


@exact
def test_within_a_unit_a_tensor_is_where_the_weights_are() -> None:
    blocks = nn.Sequential(*(Bringing() for _ in range(3)))
    assert brought(blocks) == []


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("where", [0, 1])
def test_the_copy_is_planned_to_the_byte_where_the_devices_differ(where: int) -> None:
    model = Bringing()
    profile = profiled(model)
    devices = {profile.units.index(unit): where if unit.name == "first" else 0 for unit in profile.units}
    peaks = profile.dynamic_peaks(devices, main=0)
    gc.collect()
    before = memory_allocated(where)
    dispatch_model(model, {"first": where, "second": 0}, main_device=0)
    weights = memory_allocated(where) - before
    x = torch.ones(ROWS, WIDTH, device="virtual:0")
    reset_peak_memory(where)
    with torch.no_grad():
        model(x)
    assert max_memory_allocated(where) - before == weights + peaks[where]


class Forces(nn.Module):
    """Computes the gradient of an energy in its forward, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(self.layers(x).sum(), x)
        return found


class Encoder(nn.Module):
    """Computes with packed sequences, of lengths that it is given, or that it is given packed."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor | PackedSequence, lengths: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            assert lengths is not None
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found: torch.Tensor = pad_packed_sequence(self.layers(x)[0], batch_first=True, total_length=20)[0]
        return found


def planned_and_taken(model: nn.Module, *inputs: Any) -> tuple[int, int]:
    """Return the planned activations of a forward on these inputs, and what the forward takes."""
    planned = profile_model(model, sample_inputs=inputs, device_type="virtual").activations
    model, given = model.to("virtual:0"), send_to_device(inputs, 0)
    reset_peak_memory(0)
    before = memory_allocated(0) - sum(tensor.nbytes for tensor in iter_tensors(given) if tensor.device.type != "cpu")
    with torch.no_grad():
        model(*given)
    return planned, max_memory_allocated(0) - before


@pytest.mark.usefixtures("accelerators")
def test_what_a_forward_that_enables_gradients_saves_is_planned_to_the_byte() -> None:
    planned, taken = planned_and_taken(Forces(), torch.ones(ROWS, WIDTH))
    assert planned == taken


class NotesItsThread(torch.autograd.Function):
    """The identity, whose backward notes the thread that it runs in."""

    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        NotesItsThread.threads.add(threading.get_ident())
        return gradient.clone()


@pytest.mark.usefixtures("accelerators")
def test_no_other_thread_frees_gradients_some_time_after_the_forward() -> None:
    model = Forces()
    model.layers.append(alone := nn.Identity())
    alone.forward = NotesItsThread.apply  # type: ignore[method-assign]
    NotesItsThread.threads.clear()
    profile_model(model, sample_inputs=torch.ones(ROWS, WIDTH), device_type="virtual")
    assert NotesItsThread.threads == {threading.get_ident()}


@pytest.mark.usefixtures("accelerators")
@alike("kind", [nn.GRU, nn.LSTM], first=1)
def test_packed_sequences_are_planned_to_the_byte(kind: type[nn.RNNBase]) -> None:
    x, lengths = torch.ones(3, 16, WIDTH), torch.tensor([5, 16, 11])
    planned, taken = planned_and_taken(Encoder(kind), x, lengths)
    assert planned == taken
    given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    planned, taken = planned_and_taken(Encoder(kind), given)
    assert planned == taken
