"""The guarded first forward of models whose activations nobody knows: budgets hold, and the plan is corrected."""

from __future__ import annotations

import copy
import gc
import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from bigmodel import dispatch_model, from_pretrained, get_plan, make_plan, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch.attach.activation_guard import ActivationGuard
from bigmodel.dispatch.attach.builder import Builder
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import Plan

from ...accelerators import exact, held
from ...examples import alike, few
from ..guarded import guard

pytestmark = [pytest.mark.usefixtures("every_accelerator"), exact]

DEVICE = "virtual:0"


class Odd:
    """An input of no convention: an object that the model asks for its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Growing(nn.Module):
    """Blocks of several widths, after each of which there are more rows: activations outgrow the weights.

    The forward keeps the output of its first block until the end, and decides by a value, which no dry run knows.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 24, 16, 32), growth: tuple[int, ...] = (2, 1, 4, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((widths[0],), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, following))
            for width, following in zip(widths, (*widths[1:], widths[0]), strict=True)
        )
        self.growth = growth
        self.fail = False

    def forward(self, odd: Odd) -> torch.Tensor:
        self.calls += 1
        x = odd.tensor * self.scale
        kept = []
        for block, times in zip(self.blocks, self.growth, strict=True):
            x = block(x)
            kept = kept or [x]
            if float(x.detach().abs().sum()) >= 0:
                x = x.repeat(times, 1)
        if self.fail:
            raise ValueError("asked to fail")
        return x[: len(kept[0])] + kept[0].sum()

    def decode(self, odd: Odd) -> torch.Tensor:
        """Another method that a computation begins with."""
        return self.blocks[0](odd.tensor).repeat(8, 1)


def inputs(rows: int = 4, width: int = 16) -> Odd:
    torch.manual_seed(1)
    return Odd(torch.randn(rows, width).to(DEVICE))


def run(model: nn.Module, odd: Odd) -> torch.Tensor:
    with torch.no_grad():
        return model(odd).cpu()


def resident_run(model: nn.Module, odd: Odd) -> torch.Tensor:
    """The slow, obvious twin: the whole model on one accelerator."""
    return run(copy.deepcopy(model).to(DEVICE), odd)


def plan_of(model: nn.Module) -> Plan:
    plan = get_plan(model)
    assert plan is not None
    return plan


def dispatch(model: nn.Module, budget: int | str, **options: Any) -> nn.Module:
    return dispatch_model(model, "auto", max_memory={0: budget, "cpu": "1GB"}, **options)


def peak_of(work: Any, index: int = 0) -> int:
    """Return the peak bytes of an accelerator while `work` runs."""
    gc.collect()
    reset_peak_memory(index)
    work()
    return max_memory_allocated(index)


@pytest.fixture
def needed() -> int:
    """Bytes under which the first forward of `Growing` is sure to run: weights, one slot, and its activations."""
    model, odd = Growing().to(DEVICE).eval(), inputs()
    return peak_of(lambda: run(model, odd))


class Keeping(Growing):
    """Keeps a tensor from one forward to the next."""

    def forward(self, odd: Odd) -> torch.Tensor:
        found = super().forward(odd)
        self.last = odd.tensor.repeat(16, 1) * found.mean()
        return found


def test_what_modules_keep_is_beside_the_next_forward() -> None:
    model, odd = Keeping().eval(), inputs()
    dispatch(model, "1MB")
    run(model, odd)
    planned = plan_of(model).devices[0].total
    assert 0.9 * planned <= peak_of(lambda: [run(model, odd) for _ in range(2)]) <= planned


def test_until_the_first_forward_all_is_streamed_through_one_slot() -> None:
    model = dispatch(Growing().eval(), "1MB")
    plan = plan_of(model)
    assert plan.guarded
    assert plan.slots == 1
    assert {part.name for part in plan.parts if part.device == 0} == {"scale", "calls"}
    assert any("first forward" in note for note in plan.notes)


@pytest.mark.slow
def test_the_first_forward_corrects_the_plan_and_places_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model = Growing().eval()
    odd, expected = inputs(), resident_run(model, inputs())
    dispatch(model, "1MB")
    assert plan_of(model).devices[0].activations == 0
    with caplog.at_level(logging.WARNING, "bigmodel"):
        assert torch.equal(run(model, odd), expected)
    plan = plan_of(model)
    assert not plan.guarded
    assert plan.devices[0].activations > 64 * odd.tensor.nbytes
    assert all(part.device == 0 for part in plan.parts)
    assert {parameter.device.type for parameter in model.parameters()} == {"virtual"}
    assert len([each for each in caplog.records if "in its first forward" in each.message]) == 1
    assert peak_of(lambda: run(model, odd)) == plan.devices[0].total
    assert torch.equal(run(model, odd), expected)


def test_a_model_that_became_resident_has_no_hook() -> None:
    model, odd = dispatch(Growing().eval(), "1MB"), inputs()
    run(model, odd)
    assert all("forward" not in vars(module) for module in model.modules())


def test_inputs_on_the_host_are_moved_as_in_the_first_forward() -> None:
    class OnHost(Growing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Odd(x))

    model = dispatch(OnHost().eval(), "1MB")
    x = torch.ones(4, 16)
    with torch.no_grad():
        first, second = model(x), model(x)
    assert first.device == second.device == x.device
    assert torch.equal(first, second)
    assert not plan_of(model).streamed


@pytest.mark.parametrize("then", ["forward", "decode"])
def test_inputs_on_the_host_are_moved_as_in_the_first_call_of_another_method(then: str) -> None:
    class OnHost(Growing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Odd(x))

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return super().decode(Odd(x))

    model = dispatch(OnHost().eval(), "1MB")
    x = torch.ones(4, 16)
    with torch.no_grad():
        first = model.decode(x)
        assert not plan_of(model).streamed
        assert getattr(model, then)(x).device == first.device == x.device


@pytest.mark.slow
def test_what_does_not_fit_beside_the_activations_stays_streamed(needed: int) -> None:
    model, odd = Growing().eval(), inputs()
    expected = resident_run(model, odd)
    before = memory_allocated(0) - odd.tensor.nbytes
    dispatch(model, needed)
    peaks = [peak_of(lambda: run(model, odd)) - before for _ in range(3)]
    plan = plan_of(model)
    assert plan.streamed
    assert max(peaks) <= needed
    assert peaks[1] == peaks[2] == plan.devices[0].total <= needed
    assert torch.equal(run(model, odd), expected)


@pytest.mark.slow
def test_a_forward_that_cannot_keep_its_budget_says_by_how_much(needed: int) -> None:
    model = dispatch(Growing().eval(), needed // 2)
    with pytest.raises(BudgetError, match=r"passes the budget of device 0 by .* when 'blocks\.3\.2' had run"):
        run(model, inputs())
    assert plan_of(model).guarded
    assert run(model, inputs(rows=1)).shape == (1, 16)
    assert not plan_of(model).guarded


def test_after_an_exception_the_next_forward_is_the_first() -> None:
    model, odd = Growing().eval(), inputs()
    expected = resident_run(model, odd)
    dispatch(model, "1MB")
    before = held(0)
    places = {name: parameter.device for name, parameter in model.named_parameters()}
    model.fail = True
    with pytest.raises(ValueError, match="asked to fail"):
        run(model, odd)
    assert held(0) == before
    assert places == {name: parameter.device for name, parameter in model.named_parameters()}
    assert plan_of(model).guarded
    model.fail = False
    assert torch.equal(run(model, odd), expected)
    assert not plan_of(model).guarded


@pytest.mark.slow
def test_threads_that_share_the_first_forward_wait_for_it() -> None:
    model, odd = Growing().eval(), inputs()
    expected = resident_run(model, odd)
    dispatch(model, "1MB")
    outputs: list[torch.Tensor] = []
    errors: list[BaseException] = []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        try:
            outputs.extend(run(model, odd) for _ in range(2))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(outputs) == 8
    assert all(torch.equal(output, expected) for output in outputs)
    assert not plan_of(model).guarded


@pytest.mark.slow
def test_a_call_while_the_model_is_placed_anew_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, odd = Growing().eval(), inputs()
    expected = resident_run(model, odd)
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(run(model, odd)))
    build = Builder.build

    def build_beside_a_call(builder: Builder) -> Any:
        if builder.model is model and not outputs and thread.ident is None:
            thread.start()
            thread.join(0.5)
        return build(builder)

    dispatch(model, "1MB")
    monkeypatch.setattr(Builder, "build", build_beside_a_call)
    assert torch.equal(run(model, odd), expected)
    thread.join()
    assert len(outputs) == 1
    assert torch.equal(outputs[0], expected)
    assert "_call_impl" not in vars(model)


def test_a_thread_that_waited_is_measured_if_the_first_forward_raises() -> None:
    model, odd = Growing().eval(), inputs()
    reached, release = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    class Blocking(Odd):
        @property
        def tensor(self) -> torch.Tensor:
            reached.set()
            release.wait()
            raise ValueError("asked to fail")

        @tensor.setter
        def tensor(self, value: torch.Tensor) -> None: ...

    dispatch(model, "1MB")

    def fail() -> None:
        try:
            run(model, Blocking(odd.tensor))
        except ValueError as error:
            raised.append(error)

    first = threading.Thread(target=fail)
    second = threading.Thread(target=run, args=(model, odd))
    first.start()
    reached.wait()
    second.start()
    release.set()
    first.join()
    second.join()
    assert len(raised) == 1
    assert not plan_of(model).guarded


@pytest.mark.parametrize("forwards", [0, 1])
def test_undispatch_gives_the_plain_model_back(forwards: int) -> None:
    model, odd = Growing().eval(), inputs()
    plain = copy.deepcopy(model)
    before = held(0)
    dispatch(model, "1MB")
    for _ in range(forwards):
        run(model, odd)
    undispatch(model, "cpu")
    assert dispatched(model) is None
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert held(0) == before
    assert model.calls == forwards


def test_a_method_beside_forward_is_guarded_too(needed: int) -> None:
    model, odd = dispatch(Growing().eval(), "1MB"), inputs()
    with torch.no_grad():
        first = model.decode(odd)
        assert not plan_of(model).guarded
        assert torch.equal(model.decode(odd), first)


def test_a_model_that_calls_itself_is_measured_once() -> None:
    class Twice(Growing):
        def forward(self, odd: Odd, again: bool = True) -> torch.Tensor:
            return self(odd, again=False) if again else super().forward(odd)

    model = dispatch(Twice().eval(), "1MB")
    run(model, inputs())
    assert not plan_of(model).guarded


@pytest.mark.slow
def test_with_gradients_the_weights_stay_and_the_plan_is_corrected(caplog: pytest.LogCaptureFixture) -> None:
    model, odd = Growing(), inputs()
    twin = copy.deepcopy(model).to(DEVICE)
    dispatch(model, "1MB")
    parameters = list(model.parameters())
    with caplog.at_level(logging.WARNING, "bigmodel"):
        model(odd).sum().backward()
    assert "stay streamed" in caplog.text
    twin(odd).sum().backward()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.cpu(), theirs.grad.cpu())
    assert plan_of(model).devices[0].activations > 0
    assert not plan_of(model).guarded


@pytest.mark.slow
def test_weights_that_an_optimizer_holds_stay_what_they_are() -> None:
    model, odd = dispatch(Growing(), "1MB"), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, odd)
    assert plan_of(model).streamed
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    model(odd).sum().backward()
    optimizer.step()
    after = [parameter.detach().cpu() for parameter in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_part_that_another_thread_computes_delays_the_placement() -> None:
    entered, leave = threading.Event(), threading.Event()
    odd = inputs()

    class Waiting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                leave.wait()
            return super().forward(x)

    class StartsAnother(Growing):
        def forward(self, odd: Odd) -> torch.Tensor:
            output = super().forward(odd)
            if not entered.is_set():
                other.start()
                entered.wait()
            return output

    model = StartsAnother().eval()
    model.blocks[0][0] = Waiting(16, 32)
    other = threading.Thread(target=lambda: model.blocks[0][0](odd.tensor))
    dispatch(model, "1MB")
    first = run(model, odd)
    assert plan_of(model).guarded
    leave.set()
    other.join()
    assert torch.equal(run(model, odd), first)
    assert not plan_of(model).guarded


def test_weights_that_were_built_in_memory_need_no_folder() -> None:
    """The host's budget is for what stays there: until the first forward has been measured nearly all does."""
    model, odd = Growing().eval(), inputs()
    dispatch_model(model, "auto", max_memory={0: "1MB", "cpu": 1000})
    run(model, odd)
    assert not plan_of(model).streamed


@pytest.mark.slow
def test_weights_on_disk_are_streamed_and_become_resident(tmp_path: Path) -> None:
    model, odd = Growing().eval(), inputs()
    expected = resident_run(model, odd)
    dispatch_model(model, "auto", max_memory={0: "1MB", "cpu": 5000}, offload_dir=tmp_path)
    assert "disk" in plan_of(model).device_map.values()
    assert torch.equal(run(model, odd), expected)
    assert not plan_of(model).streamed
    assert torch.equal(run(model, odd), expected)


def test_a_plan_of_unknown_activations_is_guarded_and_kept_as_json() -> None:
    model = Growing().eval()
    plan = make_plan(model, {0: "1MB", "cpu": "1GB"})
    assert plan.guarded
    assert Plan.from_json(plan.to_json()) == plan
    dispatch_model(model, plan)
    run(model, inputs())
    assert not plan_of(model).guarded
    assert not plan_of(model).streamed


def test_sample_inputs_and_strict_need_no_guard() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    budgets = {0: "1MB", "cpu": "1GB"}
    assert not make_plan(model, budgets, sample_inputs=torch.ones(1, 8)).guarded
    assert not make_plan(model, {"cpu": "1GB"}).guarded
    with pytest.raises(PlanError, match="give sample_inputs"):
        make_plan(model, budgets, strict=True)


class ByValue(GPT2LMHeadModel):
    """A language model whose forward reads a number that its weights decide, so that no dry run knows it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        int(self.transformer.wte.weight.sum())
        return super().forward(*args, **kwargs)


@pytest.mark.slow
@alike(("budget", "host"), [("1MB", "1GB"), (150_000, 40_000), (150_000, "1GB")], first=1)
def test_a_checkpoint_is_loaded_guarded_and_generates(
    budget: int | str, host: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    twin = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.arange(1, 9).reshape(1, 8)
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 10**6, "pad_token_id": 0}
    expected = twin.generate(ids, **asked)
    monkeypatch.setattr("transformers.GPT2LMHeadModel", ByValue)
    before = held(0)
    model = from_pretrained(tmp_path, max_memory={0: budget, "cpu": host})
    assert isinstance(model, ByValue)
    assert plan_of(model).guarded
    found: list[torch.Tensor] = []
    peak = peak_of(lambda: found.append(model.generate(ids, **asked))) - before
    assert torch.equal(found[0], expected)
    assert peak <= plan_of(model).devices[0].budget
    assert not plan_of(model).guarded


@pytest.mark.slow
@settings(max_examples=few(14))
@given(
    widths=st.lists(st.integers(4, 40), min_size=1, max_size=6).map(tuple),
    growth=st.lists(st.integers(1, 4), min_size=6, max_size=6).map(tuple),
    rows=st.integers(1, 6),
    share=st.floats(0.2, 3),
    count=st.integers(1, 2),
    on_disk=st.booleans(),
)
def test_no_forward_of_any_model_passes_any_budget(
    widths: tuple[int, ...], growth: tuple[int, ...], rows: int, share: float, count: int, on_disk: bool
) -> None:
    """The first forward either keeps to the budgets or is refused, exactly where the cautious placement cannot."""
    model, odd = Growing(widths, growth[: len(widths)]).eval(), inputs(rows, widths[0])
    before = [held(0) - odd.tensor.nbytes, held(1)]
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    results: list[torch.Tensor] = []
    activations = peak_of(lambda: results.append(resident_run(model, odd))) - before[0] - weights
    budgets: dict[int | str, int | str] = dict.fromkeys(range(count), int((weights + activations) * share) // count)
    try:
        plan = make_plan(model, {**budgets, "cpu": "1GB"})
    except BudgetError:
        return
    if not plan.guarded:  # an accelerator that not even one block fits is left alone
        return
    least = plan.devices[0].total + activations
    if on_disk:
        plan = make_plan(model, {**budgets, "cpu": weights // 2 + 1}) if weights > 4000 else plan
    with tempfile.TemporaryDirectory() as folder:
        dispatch_model(model, plan, offload_dir=folder)
        for forward in range(3):
            gc.collect()
            for index in range(count):
                reset_peak_memory(index)
            try:
                output = run(model, odd)
            except BudgetError:
                assert forward == 0
                assert least > budgets[0]
                break
            assert least <= budgets[0]
            assert torch.equal(output, results[0])
            corrected = plan_of(model)
            for index in range(count):
                taken = max_memory_allocated(index) - before[index]
                assert taken <= budgets[index]
                if forward:
                    assert taken <= corrected.devices[index].total <= budgets[index]
                    if count == 1:
                        assert taken == corrected.devices[index].total
        undispatch(model, "cpu")


def test_the_first_calls_are_measured_under_one_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("__call__", "decode"):
        model = dispatch(Growing().eval(), "1MB")
        unlocked = [guard(monkeypatch, ActivationGuard, name) for name in ("_measuring", "_replaced")]
        with torch.no_grad():
            getattr(model, method)(inputs())
        assert unlocked == [[], []]
        monkeypatch.undo()
