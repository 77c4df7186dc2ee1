"""The gradients of a streamed model are the gradients of the resident one, bit for bit."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from bigmodel.devices import max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import DispatchError
from tests.marks import pairwise

from ...accelerators import at, exact, held
from ...examples import alike, some
from ..interrupting import Interrupt, interrupted_at
from ..models import Block, ids, llama, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")

EVERY = 7
"""Of all moments at which Ctrl-C may come one in so many is tried."""

MAPS = [
    {"": "cpu"},
    {"": 0, "blocks.1": "cpu", "blocks.3": "cpu"},
    {"": "cpu", "blocks": 0},
    {"": 0, "scale": "cpu", "head": "cpu", "embed": "cpu"},
]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(gradient, other), name  # type: ignore[arg-type]


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_the_resident_model(device_map: dict[str, object], training: bool) -> None:
    resident = stack().to(at(0)).train(training)
    resident(ids().to(at(0))).square().sum().backward()
    streamed = dispatch_model(stack().train(training), device_map, main_device=at(0))
    streamed(ids()).square().sum().backward()
    assert_same(gradients(streamed), gradients(resident))
    # Statistics count a forward once, although streamed blocks are computed again in backward.
    assert torch.equal(streamed.norm.running_mean.cpu(), resident.norm.running_mean.cpu())
    assert streamed.norm.num_batches_tracked.item() == resident.norm.num_batches_tracked.item()


def test_frozen_weights_get_no_gradient_and_adapters_get_theirs() -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, p in model.named_parameters():
            p.requires_grad_("up" in name)
        return model

    resident = freeze(stack()).to(at(0))
    resident(ids().to(at(0))).square().sum().backward()
    streamed = dispatch_model(freeze(stack()), {"": "cpu"}, main_device=at(0))
    streamed(ids()).square().sum().backward()
    assert_same(gradients(streamed), gradients(resident))
    assert streamed.scale.grad is None


class WithWeights(nn.Linear):
    """Returns what its kind returns: an output, and None for the weights of an attention that were not asked for."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None, dict[str, None]]:
        return super().forward(input), None, {"cache": None}


def test_a_block_that_also_returns_none_learns_and_returns_it() -> None:
    block = WithWeights(4, 4)
    resident, streamed = copy.deepcopy(block).to(at(0)), dispatch_model(block, {"": "cpu"}, main_device=at(0))
    for model in (resident, streamed):
        output, *rest = model(torch.ones(2, 4, device=at(0)))
        assert rest == [None, {"cache": None}]
        output.sum().backward()
    assert_same(gradients(streamed), gradients(resident))


def test_dropout_is_the_same_in_backward() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))

    x = torch.randn(4, 8)
    resident = build().to(at(0))
    torch.manual_seed(7)
    resident(x.to(at(0))).sum().backward()
    streamed = dispatch_model(build(), {"": "cpu"}, main_device=at(0))
    torch.manual_seed(7)
    streamed(x).sum().backward()
    assert_same(gradients(streamed), gradients(resident))


@pytest.mark.slow
def test_a_language_model_with_a_cache_learns_the_same() -> None:
    tokens = torch.arange(10).view(2, 5)
    resident = llama().to(at(0)).train()
    loss = resident(tokens.to(at(0)), labels=tokens.to(at(0)), use_cache=True).loss
    loss.backward()
    streamed = dispatch_model(llama().train(), {"": "cpu"}, main_device=at(0))
    streamed_loss = streamed(tokens, labels=tokens, use_cache=True).loss
    streamed_loss.backward()
    assert torch.equal(streamed_loss.detach().cpu(), loss.detach().cpu())
    assert_same(gradients(streamed), gradients(resident))


def language_gradients(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor | None]:
    """Those of one forward under autocast to `dtype`, with the backward outside of it, where it belongs."""
    tokens = torch.arange(10).view(2, 5).to(at(0))
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
        loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return gradients(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@alike(("dtype", "checkpointed"), [(torch.bfloat16, False), (torch.float16, True), (None, True)], first=1, ids=str)
def test_autocast_and_checkpointing_hold_in_the_second_computation(dtype: torch.dtype, checkpointed: bool) -> None:
    def build() -> nn.Module:
        model = llama().train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    expected = language_gradients(build().to(at(0)), dtype)
    streamed = dispatch_model(build(), {"": 0, "model.layers.1": "cpu", "model.layers.3": "cpu"}, main_device=at(0))
    assert_same(language_gradients(streamed, dtype), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_streamed_block_computes_it_again(reentrant: bool) -> None:
    x = torch.randn(2, 8, device=at(0), requires_grad=True)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))).to(at(0))
    blocks(x).sum().backward()
    expected, x.grad = {**gradients(blocks), "x": x.grad.cpu()}, None
    streamed = dispatch_model(blocks.cpu().requires_grad_(True), {"": "cpu"}, main_device=at(0))
    streamed.zero_grad()
    y = x
    for block in streamed:
        y = checkpoint(block, y, use_reentrant=reentrant)
    y.sum().backward()
    assert_same({**gradients(streamed), "x": x.grad.cpu()}, expected)


def test_a_reentrant_checkpoint_within_a_streamed_block_is_refused_with_what_to_do() -> None:
    class Inside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    streamed = dispatch_model(nn.Sequential(nn.Linear(8, 8), Inside(8, 8)), {"": "cpu"}, main_device=at(0))
    loss = streamed(torch.randn(2, 8)).sum()
    with pytest.raises(DispatchError, match="Pass use_reentrant=False, or leave checkpointing off"):
        loss.backward()


@pytest.mark.slow
@alike("kernels", ["foreach", "fused", "single"], first=1)
def test_an_optimizer_step_on_the_host_weights_is_seen_by_the_next_forward(kernels: str) -> None:
    """Fused kernels increase no version counter of what they write to."""
    streamed = dispatch_model(stack().train(), {"": "cpu"}, main_device=at(0))
    resident = copy.deepcopy(stack()).train().to(at(0))
    for model, x in ((streamed, ids()), (resident, ids().to(at(0)))):
        options = {"fused": kernels == "fused", "foreach": kernels == "foreach"}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for (name, p), (_, q) in zip(streamed.named_parameters(), resident.named_parameters()):
        assert torch.equal(p.cpu(), q.cpu()), name


def test_hooks_of_optimizers_go_with_the_model() -> None:
    before = len(_global_optimizer_post_hooks)
    model = dispatch_model(stack(), {"": "cpu"}, main_device=at(0))
    assert len(_global_optimizer_post_hooks) == before + 1
    undispatch(model)
    assert len(_global_optimizer_post_hooks) == before


def wanted(model: nn.Module) -> list[nn.Parameter]:
    return [model.blocks[1].up.weight, model.embed.weight, model.blocks[0].down.bias]


@pytest.mark.slow
def test_gradients_may_be_asked_for_by_name() -> None:
    found = []
    for model in (stack().train().to(at(0)), dispatch_model(stack().train(), {"": "cpu"}, main_device=at(0))):
        x = ids().to(at(0))
        asked = torch.autograd.grad(model(x).square().sum(), wanted(model))
        model(x).square().sum().backward(inputs=wanted(model))
        assert sum(gradient is not None for gradient in gradients(model).values()) == 3
        found.append([*asked, *(parameter.grad for parameter in wanted(model))])
    for resident, streamed in zip(*found, strict=True):
        assert torch.equal(streamed.cpu(), resident.cpu())


def test_the_state_of_an_optimizer_may_be_copied() -> None:
    model = dispatch_model(stack().train(), {"": "cpu"}, main_device=at(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(ids()).square().sum().backward()
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    for copied, state in zip(kept["state"].values(), optimizer.state.values(), strict=True):
        assert type(copied["exp_avg"]) is type(torch.zeros(1, device=state["exp_avg"].device))
        assert torch.equal(copied["exp_avg"], state["exp_avg"])
        assert copied["exp_avg"] is not state["exp_avg"]


@exact
def test_weights_leave_the_device_between_forward_and_backward() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
    weights = sum(p.nbytes for p in model.parameters())
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    before = held(0)
    reset_peak_memory(0)
    model(torch.randn(1, 256)).sum().backward()
    one_block = weights // 8
    assert max_memory_allocated(0) - before < 2 * one_block


class Sometimes(nn.Linear):
    """Calls a given function before it computes, in forward and in backward."""

    first: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first()
        return super().forward(x)


def streamed_pair() -> tuple[nn.Module, Sometimes]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(Sometimes(8, 8), nn.ReLU()))
    return dispatch_model(model, {"": "cpu"}, main_device=at(0)), model[1][0]


def assert_untouched(model: nn.Module, host: list[nn.Parameter]) -> None:
    """All weights are the host's, nothing occupies a slot, and training goes on as if nothing had happened."""
    assert [p is each for p, each in zip(model.parameters(), host)] == [True] * len(host)
    found = dispatched(model)
    assert found is not None
    assert [streamer.in_use for streamer in found.streamers] == [0] * len(found.streamers)


def check_still_trains(model: nn.Module) -> None:
    x = torch.ones(2, 8)
    twin = streamed_pair()[0]
    model.zero_grad()
    for each in (model, twin):
        each(x).square().sum().backward()
    assert_same(gradients(model), gradients(twin))


def test_an_exception_in_the_second_computation_leaves_everything_as_it_was() -> None:
    model, layer = streamed_pair()
    host = list(model.parameters())
    loss = model(torch.ones(2, 8)).square().sum()
    layer.first = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert_untouched(model, host)
    assert all(p.grad is None for p in host)
    layer.first = lambda: None
    check_still_trains(model)


@exact
def test_memory_that_runs_out_in_backward_leaves_everything_as_it_was() -> None:
    model, layer = streamed_pair()
    host = list(model.parameters())
    loss = model(torch.ones(2, 8)).square().sum()
    layer.first = lambda: torch.empty(2**20, device=at(0))
    virtual.configure(0, capacity=held(0) + 2**19)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert_untouched(model, host)
    assert all(p.grad is None for p in host)
    virtual.configure(0)
    layer.first = lambda: None
    check_still_trains(model)


@pytest.mark.slow
@exact
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_a_forward_leaves_everything_as_it_was() -> None:
    model, _ = streamed_pair()
    host = list(model.parameters())
    number = 0
    while interrupted_at(number, lambda: model(torch.ones(2, 8)), within="/bigmodel/dispatch/"):
        assert_untouched(model, host)
        number += EVERY
    assert number > 100
    check_still_trains(model)


@pytest.mark.slow
@exact
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_the_second_computation_does_so_too() -> None:
    model, layer = streamed_pair()
    host = list(model.parameters())
    number, came = 0, True
    while came:
        loss = model(torch.ones(2, 8)).square().sum()
        interrupt = Interrupt(number, within="/bigmodel/dispatch/")
        layer.first = interrupt.arm
        with suppress(KeyboardInterrupt):
            loss.backward()
        interrupt.disarm()
        layer.first = lambda: None
        assert_untouched(model, host)
        came = interrupt.came
        number += EVERY
    assert number > 30
    check_still_trains(model)


def whole(model: nn.Module, *classes: str, **options: Any) -> nn.Module:
    """Dispatch `model` to the host, streamed by modules of these classes."""
    return dispatch_model(model, {"": "cpu"}, main_device=at(0), no_split_module_classes=classes, **options)


class Pair(nn.Module):
    """Two layers that come as one block; `wrap` and `unwrap` are what goes in and out."""

    def __init__(self, unwrap: Callable[[Any], Any] = lambda x: x, wrap: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unwrap, self.wrap = unwrap, wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.second(torch.tanh(self.first(self.unwrap(x)))))


@dataclass
class Carrier:
    x: torch.Tensor
    count: int = 0


def assert_trains_like_a_resident_one(make: Callable[[], nn.Module], *classes: str, **options: Any) -> None:
    x = torch.ones(2, 8)
    models = []
    for place in (lambda model: model.to(at(0)), lambda model: whole(model, *classes, **options)):
        torch.manual_seed(0)
        models.append(place(make()))
    resident, streamed = models
    resident(x.to(at(0))).square().sum().backward()
    streamed(x).square().sum().backward()
    assert_same(gradients(streamed), gradients(resident))


class Around(nn.Module):
    """A layer whose output goes into a block, whose output goes into another layer."""

    def __init__(self, inside: Pair, give: Callable[[Any], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(8, 8), inside, nn.Linear(8, 8)
        self.give, self.take = give, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.take(self.inside(self.give(self.before(x)))))


def test_gradients_flow_through_dataclasses() -> None:
    def make() -> nn.Module:
        inside = Pair(unwrap=lambda carrier: carrier.x, wrap=lambda x: (Carrier(x), "text"))
        return Around(inside, Carrier, lambda output: output[0].x)

    assert_trains_like_a_resident_one(make, "Pair")


def test_a_tensor_that_is_returned_in_an_unknown_object_is_refused_where_gradients_are_wanted() -> None:
    inside = Pair(wrap=lambda x: SimpleNamespace(states=x))
    model = whole(Around(inside, lambda x: x, lambda output: output.states), "Pair")
    with torch.no_grad():
        model(torch.ones(2, 8))
    with pytest.raises(DispatchError, match="SimpleNamespace"):
        model(torch.ones(2, 8))


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self.out(x) if depth == 0 else self(torch.tanh(self.down(x)), depth - 1)


def test_a_module_may_call_itself() -> None:
    assert_trains_like_a_resident_one(lambda: nn.Sequential(Recursive(), Recursive()), "Recursive")


@pytest.mark.slow
def test_threads_may_compute_gradients_at_once() -> None:
    torch.manual_seed(0)
    resident = nn.Sequential(*(Pair() for _ in range(3))).to(at(0))
    streamed = whole(copy.deepcopy(resident).cpu(), "Pair")
    weights = list(streamed.parameters())
    inputs = [torch.randn(4, 8) for _ in range(4)]
    expected = [torch.autograd.grad(resident(x.to(at(0))).square().sum(), list(resident.parameters())) for x in inputs]
    wrong: list[object] = []

    def train(number: int) -> None:
        for _ in range(5):
            found = torch.autograd.grad(streamed(inputs[number]).square().sum(), weights)
            wrong.extend(number for a, b in zip(found, expected[number]) if not torch.equal(a, b.cpu()))

    def noting(number: int) -> None:
        try:
            train(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=noting, args=(number,)) for number in range(len(inputs))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads meet in the middle of what each does
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_second_derivative_is_refused_and_not_left_out() -> None:
    model = whole(nn.Sequential(Pair(), Pair()), "Pair")
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(DispatchError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("replace", [False, True])
def test_weights_that_change_between_forward_and_backward_are_noticed(replace: bool) -> None:
    model = whole(nn.Sequential(Pair(), Pair()), "Pair")
    loss = model(torch.ones(2, 8)).sum()
    layer = model[0].first
    if replace:
        layer.weight = nn.Parameter(torch.ones(8, 8))
        with torch.no_grad():
            model(torch.ones(2, 8))
    else:
        with torch.no_grad():
            layer.weight.mul_(2)
    with pytest.raises(DispatchError, match="changed between its forward and its backward"):
        loss.backward()


def test_the_first_backward_after_a_parameter_was_replaced_is_the_new_ones() -> None:
    model = whole(nn.Sequential(Pair(), Pair()), "Pair")
    old = model[0].first.weight
    new = model[0].first.weight = nn.Parameter(torch.ones(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    assert old.grad is None
    assert new.grad is not None


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.linear(x)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_buffer_that_is_replaced_in_forward_counts_once(offload_buffers: bool) -> None:
    assert_trains_like_a_resident_one(lambda: nn.Sequential(Counting()), "Counting", offload_buffers=offload_buffers)
    model = whole(nn.Sequential(Counting()), "Counting", offload_buffers=offload_buffers)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    assert model[0].count.item() == 3


HOOKED: list[Any] = [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm]
"""A hook before the layer's forward makes the weight, of those on the host: other last bits than CUDA's."""
NORMS: list[Any] = [
    torch.nn.utils.parametrizations.spectral_norm,
    torch.nn.utils.parametrizations.weight_norm,
    *HOOKED,
    lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
]


class Normed(nn.Module):
    """A residual block, one weight of which is made anew in each forward."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = norm(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("norm", "is_leaf", "offload_buffers"), pairwise(some(NORMS, first=2), [False, True], [False, True])
)
def test_weights_made_in_forward_and_the_state_they_are_made_with_learn_the_same(
    norm: Callable[[nn.Module], nn.Module], is_leaf: bool, offload_buffers: bool
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(norm(nn.Linear(8, 8)) if is_leaf else Normed(norm) for _ in range(3)))

    model, resident, x = make(), make(), torch.randn(4, 8)
    dispatch_model(model, {"": "cpu"}, main_device=at(0), offload_buffers=offload_buffers)
    dispatch_model(resident, {"": 0}, force_hooks=True)
    for _ in range(3):
        for each in (model, resident):
            each.zero_grad()
            each(x).square().sum().backward()
        if is_leaf and norm in HOOKED and at(0).startswith("cuda"):
            torch.testing.assert_close(gradients(model), gradients(resident))
        else:
            assert_same(gradients(model), gradients(resident))
    for one, other in zip(model.buffers(), resident.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=1e-6)


class Renormalised(nn.Module):
    """Writes to its weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x + self.inner(x @ self.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_forward_writes_into_a_streamed_parameter_stays(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Renormalised() for _ in range(3)))
    expected = [block.weight.detach() / 4 for block in model]
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with mode():
        for _ in range(2):
            model(torch.ones(1, 4))
    assert all(torch.equal(block.weight.detach(), weight) for block, weight in zip(model, expected))


def add(weight: nn.Parameter) -> None:
    weight.add_(1)


def add_to_data(weight: nn.Parameter) -> None:
    weight.data.add_(1)


def set_data(weight: nn.Parameter) -> None:
    weight.data = weight + 1


def set_whole(weight: nn.Parameter) -> None:
    weight.set_(weight + 1)  # type: ignore[call-overload]


class Writing(nn.Module):
    """Writes to a parameter and to a buffer in each forward, and computes with both."""

    def __init__(self, write: Callable[[nn.Parameter], None] | None, trained: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.count = nn.Parameter(torch.zeros(4), requires_grad=trained)
        self.register_buffer("seen", torch.zeros(4))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
            if self.write is None:
                self.count = nn.Parameter(self.count + 1, self.count.requires_grad)
            else:
                self.write(self.count)
        return self.inner(x) * self.count + self.seen


@pytest.mark.parametrize(
    ("write", "where", "offload_buffers", "mode"),
    pairwise(
        [add, add_to_data, set_data, set_whole, None],
        ["cpu", "disk"],
        [False, True],
        [torch.no_grad, torch.enable_grad],
    ),
)
def test_a_parameter_is_kept_however_a_forward_writes_it(
    mode: Callable[[], Any], offload_buffers: bool, where: str, write: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Writing(write) for _ in range(3))).eval()

    resident, model, x = build().to(at(0)), build(), torch.ones(1, 4).to(at(0))
    dispatch_model(model, {"": where}, main_device=at(0), offload_buffers=offload_buffers, offload_dir=tmp_path)
    with mode():
        for _ in range(3):
            assert torch.equal(model(x), resident(x))
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), resident.state_dict()[name].cpu()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "offload_buffers"), [(add, True), (add_to_data, False), (set_data, True), (set_whole, False)]
)
def test_a_parameter_beside_written_buffers_that_forward_writes_is_trained(
    write: Callable[[nn.Parameter], None], offload_buffers: bool
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Writing(write, trained=True) for _ in range(3)))

    resident, model, x = build().to(at(0)), build(), torch.ones(1, 4).to(at(0))
    dispatch_model(model, {"": "cpu"}, main_device=at(0), offload_buffers=offload_buffers)
    for each in (resident, model, resident, model):
        each(x).square().sum().backward()
    assert_same(gradients(model), gradients(resident))
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), resident.state_dict()[name].cpu()), name


def test_a_trained_parameter_that_forward_replaces_is_refused() -> None:
    model = dispatch_model(
        nn.Sequential(*(Writing(None, trained=True) for _ in range(3))), {"": "cpu"}, main_device=at(0)
    )
    with pytest.raises(DispatchError, match="neither its own nor an argument"):
        model(torch.ones(1, 4)).sum().backward()


class Enclosing(Writing):
    """Counts with a parameter of its own around a block that is streamed by itself."""

    def __init__(self, write: Callable[[nn.Parameter], None] | None) -> None:
        super().__init__(write, trained=True)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # type: ignore[assignment]


@pytest.mark.parametrize("write", [add, add_to_data, None])
def test_a_trained_parameter_around_blocks_that_forward_writes_is_refused(
    write: Callable[[nn.Parameter], None],
) -> None:
    model = dispatch_model(Enclosing(write), {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match="writes into its parameter 'count'"):
        model(torch.ones(1, 4))


class Borrowing(nn.Module):
    """Computes with the weight of another block."""

    def __init__(self, other: nn.Linear | None) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.__dict__["other"] = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        return x if self.other is None else x @ self.other.weight[:, :].T * self.other.weight.shape[0]


def borrowing() -> nn.Sequential:
    torch.manual_seed(0)
    first = Borrowing(None)
    return nn.Sequential(first, Borrowing(first.own), nn.Linear(4, 4), Borrowing(first.own))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_weight_of_another_block_gets_its_gradient(where: str, tmp_path: Path) -> None:
    resident, model, x = borrowing().to(at(0)), borrowing(), torch.randn(3, 4)
    dispatch_model(model, {"": where}, main_device=at(0), offload_dir=tmp_path)
    for _ in range(2):
        resident(x.to(at(0))).square().sum().backward()
        model(x).square().sum().backward()
    for (name, found), expected in zip(gradients(model).items(), gradients(resident).values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_borrowed_weight_that_is_changed_before_the_backward_is_refused() -> None:
    model = borrowing()
    for p in model[3].parameters():
        p.requires_grad_(False)
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    loss = model[3](torch.ones(1, 4, device=at(0), requires_grad=True)).sum()
    with torch.no_grad():
        model[0].own.weight.add_(1)
    with pytest.raises(DispatchError, match="weights of '3' were changed"):
        loss.backward()


def test_a_weight_on_the_accelerator_that_a_streamed_block_borrows_is_refused() -> None:
    model = dispatch_model(borrowing(), {"": "cpu", "0": 0}, main_device=at(0))
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(DispatchError, match=r"'3', which is streamed, computes with a parameter of shape \(4, 4\)"):
        loss.backward()


@pytest.mark.parametrize("bias", [True, False])
def test_a_streamed_module_s_weight_that_is_tied_to_one_on_the_accelerator_gets_both_gradients(bias: bool) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        model[2].bias.requires_grad_(bias)
        return model

    resident, model, x = tied().to(at(0)), tied(), torch.randn(3, 4)
    dispatch_model(model, {"": "cpu", "0": 0}, main_device=at(0))
    for given, after in ((x, lambda each: each), (torch.ones(3, 4, device=at(0)), lambda each: each[2])):
        for each in (resident, model):
            after(each)(given.to(at(0))).square().sum().backward()
    assert gradients(model)["0.weight"] is not None
    assert_same(gradients(model), gradients(resident))


def test_a_frozen_block_that_borrows_a_trained_weight_is_refused_in_its_forward() -> None:
    model = borrowing()
    model.requires_grad_(False)
    model[0].own.weight.requires_grad_()
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match=r"'1', which is streamed, computes with '0.own.weight'"):
        model[1](torch.ones(1, 4, device=at(0)))


@pytest.mark.parametrize("where", ["cpu", 0])
def test_hooks_of_a_weight_see_its_gradient_wherever_it_went(where: object) -> None:
    model = stack()
    calls: list[str] = []
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda gradient: calls.append("gradient") or gradient * 0)
    removed = weight.register_hook(lambda gradient: calls.append("removed"))
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    dispatch_model(model, {"": where}, main_device=at(0))
    removed.remove()
    model(ids().to(at(0))).sum().backward()
    assert calls == ["gradient", "accumulated"]
    gradient = model.blocks[1].up.weight.grad
    assert gradient is not None
    assert not gradient.cpu().any()


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.grad(lambda each: model(each).sum())(x),
        lambda model, x: torch.func.jacrev(model)(x),
        lambda model, x: torch.func.functional_call(model, {k: v * 2 for k, v in model.named_parameters()}, (x,)),
        lambda model, x: torch.vmap(model)(x),
        lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        lambda model, x: torch.func.hessian(lambda each: model(each).sum())(x[0]),
    ],
)
@pytest.mark.parametrize("differentiable", [True, False])
def test_transforms_of_torch_func_go_through_streamed_blocks(
    transform: Callable[[nn.Module, torch.Tensor], Any], differentiable: bool
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(differentiable):
        expected = transform(model, x)
        dispatch_model(model, {"": "cpu"}, main_device=at(0))
        torch.testing.assert_close(transform(model, x.to(at(0))).cpu(), expected)


def test_a_transform_through_blocks_that_are_cast_on_their_way_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    dispatch_model(model, {"": "cpu"}, main_device=at(0), offload_dtype="int8")
    with pytest.raises(DispatchError, match=r"is streamed, and torch.vmap, torch.func .* cannot run through it"):
        torch.vmap(model)(torch.ones(2, 64, device=at(0)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_attention_of_pytorch_gives_the_bits_of_the_resident_model_where_gradients_are_on(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 3)
    model.train(training)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    x = torch.randn(2, 5, 16, device=at(0))
    found, expected = model(x), resident(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_same(gradients(model), gradients(resident))


@exact
def test_gradients_of_a_block_come_to_the_host_with_one_wait() -> None:
    torch.manual_seed(0)
    model = dispatch_model(nn.Sequential(Block(8), Block(8), Block(8)), {"": "cpu"}, main_device=at(0))
    loss = model(torch.randn(2, 8, device=at(0))).square().sum()
    before = virtual.host_waits()
    loss.backward()
    assert virtual.host_waits().since(before) == (0, 0, len(dispatched(model).streamers[0].blocks))


class WritesInput(nn.Module):
    """Writes into what it is given: its input, and a tensor that collects what the blocks make."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(8, 8), index

    def forward(self, x: torch.Tensor, made: torch.Tensor | None) -> torch.Tensor:
        if made is None:
            return self.linear(x.relu_())  # type: ignore[no-any-return]
        x = self.linear(x)
        made[self.index] = x
        return x


class WritingInputs(nn.Module):
    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(WritesInput(index) for index in range(3))
        self.collects = collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        made = torch.zeros(3, *x.shape, device=x.device) if self.collects else None
        for block in self.blocks:
            x = block(x, made)
        return x if made is None else made.sum(0)


@pytest.mark.parametrize("collects", [False, True])
def test_a_streamed_block_that_writes_into_a_tensor_that_it_is_given_is_not_trained(collects: bool) -> None:
    torch.manual_seed(0)
    model, x = WritingInputs(collects), torch.randn(2, 8)
    expected = model.to(at(0))(x.to(at(0))).detach().cpu()
    dispatch_model(model.cpu(), {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match=r"'blocks\.0' writes in place into a tensor that it is given"):
        model(x)
    output = model.eval()(x)
    assert torch.equal(output.cpu(), expected)
    with pytest.raises(DispatchError, match="writes in place into a tensor that it is given"):
        output.sum().backward()
    with torch.no_grad():
        assert torch.equal(model.train()(x).cpu(), expected)


class WritesItself(nn.Module):
    """Writes into its own parameters in its forward: before it computes with them, after that, or through ``.data``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "before":
                self.linear.weight.mul_(0.9)
                self.mean.mul_(0.5).add_(x.mean(0))
            elif self.how == "data":
                self.linear.weight.data.clamp_(-0.1, 0.1)
        made = torch.tanh(self.linear(x)) * (1 + self.mean)
        if self.how == "after":
            with torch.no_grad():
                self.linear.bias.add_(0.1)
        return x + made


def writing_themselves(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(WritesItself(how) for _ in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"0": 0, "1": "cpu", "2": 0}], ids=str)
@pytest.mark.parametrize("how", ["before", "data", "after"])
def test_blocks_that_write_into_their_own_parameters_are_trained_as_they_are_undispatched(
    how: str, device_map: dict[str, object]
) -> None:
    resident = writing_themselves(how).to(at(0))
    streamed = dispatch_model(writing_themselves(how), device_map, main_device=at(0))
    for model in (resident, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.to(at(0))).square().sum().backward()
            optimizer.step()
    assert_same(gradients(streamed), gradients(resident))
    for (name, found), expected in zip(streamed.named_parameters(), resident.parameters(), strict=True):
        assert torch.equal(found.cpu(), expected.cpu()), name
