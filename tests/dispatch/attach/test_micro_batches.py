"""A forward in micro-batches: the bits of each part alone, whatever fails, and nothing left in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.dispatch import dispatch_model, get_plan, undispatch
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import DispatchError, PlanError
from tests.server.tiny import tiny_model

from ...examples import alike

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]

LAYERS = 4
ROWS = 7


def places(*devices: int) -> dict[str, str]:
    """A device map of the tiny model, whose layers are on these accelerators, and its ends on the first and last."""
    ends = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0], "model.norm": devices[-1]}
    layers = {f"model.layers.{index}": device for index, device in enumerate(devices)}
    return {name: f"virtual:{device}" for name, device in {**ends, **layers, "lm_head": devices[-1]}.items()}


def in_stages(size: int | None, *devices: int) -> Any:
    made = tiny_model(layers=LAYERS)
    return dispatch_model(made, places(*(devices or (0, 0, 1, 1))), micro_batch_size=size)


def ids(rows: int = ROWS, tokens: int = 9) -> torch.Tensor:
    return torch.randint(0, 200, (rows, tokens), generator=torch.Generator().manual_seed(1)).to("virtual:0")


def parts_alone(size: int, batch: torch.Tensor, **more: Any) -> torch.Tensor:
    """The logits of each micro-batch, from the model on one accelerator."""
    whole = tiny_model(layers=LAYERS).to("virtual:0")
    with torch.no_grad():
        return torch.cat([whole(part, **more).logits for part in batch.split(size)]).cpu()


def in_flight(model: Any) -> int:
    found = dispatched(model)
    assert found is not None
    assert found.micro_batches is not None
    assert found.micro_batches.pipeline is not None
    return found.micro_batches.pipeline._in_flight


@pytest.mark.slow
@alike("size", [3, 6, 1], first=1)
def test_each_row_has_the_bits_of_its_micro_batch_alone(size: int) -> None:
    model = in_stages(size)
    with torch.no_grad():
        found = model(ids(), use_cache=False).logits
    assert torch.equal(found.cpu(), parts_alone(size, ids()))
    assert found.device == torch.device("virtual:0")
    assert dispatched(model).stages.times.steps == -(-ROWS // size)  # type: ignore[union-attr]


@pytest.mark.slow
@alike(
    ("devices", "seed"),
    [((0, 1, 0, 1), None), ((0, 1, 2, 3), 1), ((1, 1, 0, 0), None)],
    first=1,
    ids=lambda each: {None: "late", 1: "at random"}.get(each) or str(each),
)
def test_however_late_work_is_done(devices: tuple[int, ...], seed: int | None) -> None:
    virtual.enable(count=4, strict=True, seed=seed, late_compute=True)
    model = in_stages(2, *devices)
    mask = torch.ones(ROWS, 9, dtype=torch.long, device="virtual:0")
    mask[1, :4] = 0
    expected = parts_alone(2, ids(), use_cache=False)
    for _ in range(2):
        with torch.no_grad():
            found = model(ids()).logits
            masked = model(input_ids=ids(), attention_mask=mask, use_cache=False).logits
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(masked[0].cpu(), expected[0])
        assert in_flight(model) == 0


@pytest.mark.slow
def test_keys_and_values_are_those_of_all_rows() -> None:
    model = in_stages(3)
    whole = tiny_model(layers=LAYERS).to("virtual:0")
    with torch.no_grad():
        found, expected = model(ids()), whole(ids())
        following = torch.full((ROWS, 1), 5, device="virtual:0")
        steps = [
            each(following, past_key_values=out.past_key_values).logits.cpu()
            for each, out in ((model, found), (whole, expected))
        ]
    assert found.past_key_values.get_seq_length() == 10
    assert found.past_key_values.layers[LAYERS - 1].keys.shape[0] == ROWS
    torch.testing.assert_close(*steps)


@pytest.mark.slow
def test_calls_that_are_computed_whole() -> None:
    model = in_stages(2)
    counted = dispatched(model)
    assert counted is not None
    assert counted.stages is not None
    model(ids()).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        model(ids(2))
        model.generate(ids(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert counted.stages.times.steps == 0


@pytest.mark.slow
def test_without_a_size_every_call_is() -> None:
    model = in_stages(None)
    with torch.no_grad():
        found = model(ids(), use_cache=False).logits
    assert torch.equal(found.cpu(), parts_alone(ROWS, ids(), use_cache=False))
    assert dispatched(model).stages.times.steps == 0  # type: ignore[union-attr]


def test_a_model_on_one_accelerator_has_none() -> None:
    model = dispatch_model(tiny_model(layers=LAYERS), {"": "virtual:0"}, micro_batch_size=2)
    made = get_plan(model)
    assert made is not None
    assert made.micro_batch_size is None


class Fails(nn.Module):
    """A layer that fails for one row, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, bad: int | None = None) -> torch.Tensor:
        self.calls += 1
        if bad is not None and self.calls == bad:
            raise RuntimeError(f"call {self.calls} fails")
        return torch.relu(self.linear(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Fails(), Fails()

    def forward(self, x: torch.Tensor, bad: int | None = None, loss: bool = False) -> torch.Tensor:
        found = self.second(self.first(x), bad)
        return found.mean() if loss else found


def chain() -> Any:
    return dispatch_model(Chain(), {"first": "virtual:0", "second": "virtual:1"}, micro_batch_size=1)


def test_an_error_is_raised_in_the_caller_and_leaves_nothing_in_flight() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    model, x = chain(), torch.ones(6, 4, device="virtual:0")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="call 4 fails"):
            model(x, bad=4)
        assert in_flight(model) == 0
        assert torch.equal(model(x).cpu(), undispatch(model, "cpu")(x.cpu()))


def test_an_operation_that_fails_after_its_launch_is_raised_once_all_have_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bigmodel.dispatch.transfer.stages import StageStep

    model, x = chain(), torch.ones(6, 4, device="virtual:0")
    land, landings = StageStep.land, iter(range(1000))

    def failing(step: StageStep) -> None:
        land(step)
        if next(landings) in (1, 3):
            raise RuntimeError("an operation failed")

    monkeypatch.setattr(StageStep, "land", failing)
    with torch.no_grad(), pytest.raises(RuntimeError, match="an operation failed") as raised:
        model(x)
    assert raised.value.__notes__ == ["another micro-batch failed, too: RuntimeError: an operation failed"]
    assert in_flight(model) == 0


def test_an_output_without_rows_is_named() -> None:
    model, x = chain(), torch.arange(24.0, device="virtual:0").view(6, 4)
    with torch.no_grad(), pytest.raises(DispatchError, match=r"returns a tensor of shape \(\).*such as a loss"):
        model(x, loss=True)


@pytest.mark.long
@pytest.mark.slow
def test_threads_share_the_stages() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    model = in_stages(2)
    batches = [ids(ROWS, tokens) for tokens in (5, 9, 7)]

    def logits(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(batch, use_cache=False).logits.cpu()
        return found

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(logits, batches))
    for batch, each in zip(batches, found, strict=True):
        assert torch.equal(each, parts_alone(2, batch, use_cache=False))


@pytest.mark.slow
def test_undispatched_it_is_the_plain_model() -> None:
    model = in_stages(2)
    undispatch(model, "virtual:0")
    with torch.no_grad():
        assert torch.equal(model(ids()).logits.cpu(), parts_alone(ROWS, ids()))


@pytest.mark.slow
def test_a_size_contradicts_the_plan_of_another() -> None:
    made = get_plan(in_stages(2))
    assert made is not None
    assert made.micro_batch_size == 2
    with pytest.raises(PlanError, match="micro_batch_size is 3, but the plan has 2"):
        dispatch_model(tiny_model(layers=LAYERS), made, micro_batch_size=3)
    with pytest.raises(PlanError, match="micro_batch_size is 0"):
        dispatch_model(tiny_model(layers=LAYERS), places(0, 0, 1, 1), micro_batch_size=0)
