"""Models whose own code computes between their parts, when these run on several devices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.assignment import Assignment, assemble
from bigmodel.profile import profile_model

from .models import resident_output

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH = 64
DEVICES = 2**30


class Branches(nn.Module):
    """Branches of one input, joined: the parts at their ends are inside Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.one = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.one(x), self.other(x)], -1))


class Residual(nn.Module):
    """Adds its input to what its children make of it, in place if asked to."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.relu(self.up(x)))
        return made.add_(x) if self.in_place else x + made


def residuals(in_place: bool = False) -> nn.Module:
    """Return residual modules of two classes, which are split: neither class repeats."""

    class Another(Residual):
        pass

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(in_place), Another(in_place))


class Positions(nn.Module):
    """Multiplies what it is given with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(16, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return self.down(x * self.table(torch.arange(x.shape[-2], device=x.device)))


class Lending(Positions):
    """Adds the table itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.table.weight


class Joined(nn.Module):
    """Adds up what two modules made, by a module that has no tensors."""

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.sum = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), self.Sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(self.one(x), self.other(x))


class Gathering(nn.Module):
    """Reorders what its parts made by an index that it makes on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.parts(x)
        order = torch.arange(x.shape[-2], device=x.device).flip(0)
        return made[:, order] * 2  # type: ignore[no-any-return]


class Collecting(nn.Module):
    """Adds up what its parts have put into a list, or a dictionary, that it gives them."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, found: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            x = self.linear(x)
            found["all"].append(x.relu())
            found.setdefault("first", [x])
            return x

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, list[torch.Tensor]] = {"all": []}
        for part in self.parts:
            x = part(x, found)
        return torch.stack(found["all"]).sum(0) + found["first"][0]


def chain() -> nn.Module:
    """Return modules of which each takes what the one before it made."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def after_chain(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes a `chain` that ends in a module of `kind`."""
    return lambda: nn.Sequential(*chain().children(), kind())


PATTERNS: list[Callable[[], nn.Module]] = [
    Branches, residuals, lambda: residuals(in_place=True), after_chain(Positions), after_chain(Joined), chain,
    Collecting, Gathering,
]  # fmt: skip
X = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def split_plan(model: nn.Module, over: str) -> Plan:
    """Return a plan under which a part of the model does not fit the first accelerator: as much of it as may be."""
    profile = profile_model(model, device_type="virtual", sample_inputs=(X,))
    whole = plan(profile, {0: DEVICES, 1: DEVICES, "cpu": DEVICES})
    rest = {"two": {1: DEVICES, "cpu": 0, "disk": 0}}.get(over, {0: 0, "cpu": DEVICES, "disk": 0})
    for share in (2, 3, 4, 6, 8):
        tight = whole.devices[0].total - profile.weights // share
        found = plan(profile, {**rest, 0: tight}, offload="compute" if over == "compute" else "stream")
        if found.main_device == 0 and (found.streamed or over != "RAM"):
            break
    return found


def peaks(model: nn.Module, by: Plan, x: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """Return the output of a model dispatched by a plan, and the most bytes that it took of each accelerator."""
    gc.collect()
    before = [memory_allocated(index) for index in range(2)]
    dispatch_model(model, by)
    for index in range(2):
        reset_peak_memory(index)
    with torch.inference_mode():
        output = model(x.to("virtual:0"))
    return output, {index: max_memory_allocated(index) - before[index] for index in range(2)}


@pytest.mark.parametrize("over", ["two", "compute", "RAM"])
@pytest.mark.parametrize(
    "make",
    [*PATTERNS, after_chain(Lending)],
    ids=[
        "cat",
        "residual",
        "in place",
        "table",
        "sum",
        "chain",
        "collecting",
        "gathering",
        "a table that is read as a weight",
    ],
)
def test_bits_are_equal_and_peaks_are_those_of_the_plan(make: Callable[[], nn.Module], over: str) -> None:
    expected = resident_output(made(make), X)
    model = made(make)
    found = split_plan(model, over)
    output, measured = peaks(model, found, X)
    assert torch.equal(output.cpu(), expected.cpu())
    assert measured == {index: found.devices[index].total if index in found.devices else 0 for index in range(2)}
    if over == "RAM":  # whose tables are looked up where they lie
        assert {part.runs_on for part in found.parts if not part.name.endswith("table")} == {0}
    else:
        assert len({part.runs_on for part in found.parts}) == 2


@pytest.mark.parametrize(
    "make", PATTERNS, ids=["cat", "residual", "in place", "table", "sum", "chain", "collecting", "gathering"]
)
def test_a_map_that_was_never_traced_goes_by_the_structure_of_the_model(make: Callable[[], nn.Module]) -> None:
    expected = resident_output(made(make), X)
    model = made(make)
    names = [name for name, module in model.named_modules() if module._parameters]
    by_turns = {name: index % 2 for index, name in enumerate(names)}
    dispatch_model(model, by_turns)
    with torch.inference_mode():
        assert torch.equal(model(X.to("virtual:0")).cpu(), expected.cpu())


class Positions(nn.Module):
    """Makes positions where its input is while its first part may have left its output on another device."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.rotate = self.Angles()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rate", torch.rand(WIDTH))

        def forward(self, positions: torch.Tensor) -> torch.Tensor:
            return torch.sin(positions[:, None] * self.rate)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.tanh(x) * angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        positions = torch.arange(len(x), device=x.device if self.of_input else hidden.device)
        angles = self.rotate(positions)
        for part in self.parts:
            hidden = part(hidden, angles)
        return hidden


@pytest.mark.parametrize("over", ["two", "compute"])
@pytest.mark.parametrize("of_input", [True, False])
def test_positions_keep_the_plan_whichever_device_they_are_made_on(of_input: bool, over: str) -> None:
    torch.manual_seed(0)
    model = Positions(of_input)
    many = torch.randn(512, WIDTH)
    traced = profile_model(model, sample_inputs={"x": many}, device_type="virtual")
    other = 1 if over == "two" else "cpu"
    execution = tuple(other if unit.name == "embed" else 0 for unit in traced.units)
    found = assemble(traced, Assignment(execution, execution, 0), {}, "by hand")
    _, measured = peaks(model, found, many)
    assert all(measured[index] <= found.devices[index].total for index in measured if index in found.devices)
    assert found.devices[0].total - measured[0] <= (0 if of_input else many.shape[0] * 8)


class Inner(nn.Module):
    """Scales its input, and keeps that while its parts run."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * 2
        hidden = scaled
        for part in self.parts:
            hidden = torch.tanh(part(hidden))
        return hidden


class ToFirstWeight(nn.Module):
    """Brings its input to the device of its first weight, as code does that reads `model.device`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        added = made.to(self.first.weight.device) + 1
        return self.inner(added) + added.sum()


def test_what_is_computed_where_an_offloaded_weight_lies_counts_on_the_accelerator_that_it_goes_to() -> None:
    torch.manual_seed(0)
    model = ToFirstWeight()
    many = torch.randn(512, WIDTH)
    traced = profile_model(model, sample_inputs={"x": many}, device_type="virtual")
    stored = tuple("cpu" for _ in traced.units)
    slot = max(unit.nbytes for unit in traced.units)
    found = assemble(traced, Assignment(stored, tuple(0 for _ in stored), 0, slots=2, slot_bytes=slot), {}, "by hand")
    _, measured = peaks(model, found, many)
    assert 0.75 * found.devices[0].total <= measured[0] <= found.devices[0].total


class Yielding(nn.Module):
    """Adds up what its parts yield."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.one(x)
            yield self.other(x)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            for made in part(x):
                x = x + made
        return x


@pytest.mark.parametrize("over", ["compute", "RAM"])
def test_what_parts_yield_goes_to_the_main_device(over: str) -> None:
    expected = resident_output(made(Yielding), X)
    model = made(Yielding)
    found = split_plan(model, over)
    output, measured = peaks(model, found, X)
    assert torch.equal(output.cpu(), expected.cpu())
    assert all(measured[index] <= found.devices[index].total for index in range(2) if index in found.devices)


def test_outputs_that_go_to_the_next_part_do_not_come_back_in_between() -> None:
    found = split_plan(made(chain), "two")
    assert not any(part.returns for part in found.parts)
    for by in (found, found.device_map):
        model = made(chain)
        dispatch_model(model, by)
        x = X.to("virtual:0")
        before = [virtual.link(index).bytes_to_device for index in range(2)]
        with torch.inference_mode():
            model(x)
        moved = [virtual.link(index).bytes_to_device - before[index] for index in range(2)]
        assert moved == [X.nbytes, X.nbytes]  # over to the second accelerator, and the result back


def test_a_plan_says_which_outputs_return() -> None:
    found = split_plan(made(Branches), "two")
    assert {part.name for part in found.parts if part.returns} == {"one.0", "other.2"}
    assert Plan.from_json(found.to_json()) == found
    cut = replace(found, parts=tuple(replace(part, returns=False) for part in found.parts))
    model = made(Branches)
    dispatch_model(model, cut)
    with pytest.raises(RuntimeError, match="same device"), torch.inference_mode():
        model(X.to("virtual:0"))
