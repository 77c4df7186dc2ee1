"""`offload_dtype`: streamed weights that cross the link as small integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import save_model
from bigmodel.devices import memory_allocated
from bigmodel.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    from_pretrained,
    load_checkpoint_and_dispatch,
    prepare_training,
    quantization_errors,
    undispatch,
)
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.dispatch.weights.quantized_block import QuantizedBlock
from bigmodel.errors import DispatchError, PlanError
from bigmodel.plan import make_plan
from tests.marks import needs

from ...accelerators import at, exact
from ...examples import alike
from ..models import Stack, ids, llama, resident_output, stack

pytestmark = [needs("torchao"), pytest.mark.usefixtures("every_accelerator")]

KINDS = ("int8", "int4")
WIDTH = 64
SIZES = {"width": WIDTH, "depth": 3, "words": 128}
BOUND = {"int8": 0.02, "int4": 0.35}
"""How far outputs may be from exact ones, relative to their size. The weights' own error is 0.4 % and 7 %."""


def model(kind: str | None, home: str, folder: Path) -> nn.Module:
    return dispatch_model(stack(**SIZES), {"": home}, main_device=at(0), offload_dir=folder, offload_dtype=kind)


def distance(output: torch.Tensor, exact: torch.Tensor) -> float:
    return float((output.detach() - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_near_those_of_exact_weights(kind: str, home: str, tmp_path: Path) -> None:
    exact = resident_output(stack(**SIZES), ids())
    dispatched = model(kind, home, tmp_path)
    first = dispatched(ids())
    assert 0 < distance(first, exact) < BOUND[kind]
    assert torch.equal(dispatched(ids()), first)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize(("kind", "bytes_for_each"), [("int8", 1 + 4 / 128), ("int4", 0.5 + 5 / 128)])
def test_a_quarter_or_an_eighth_of_the_bytes_move(kind: str, bytes_for_each: float, home: str, tmp_path: Path) -> None:
    moved = {}
    for offload_dtype in (None, kind):
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
        dispatch_model(layers, {"": home}, main_device=at(0), offload_dir=tmp_path, offload_dtype=offload_dtype)
        with torch.no_grad():
            layers(torch.ones(1, 256))
        counters = layers.dispatch_stats()[at(0)]
        moved[offload_dtype] = counters["bytes_from_ram"] + counters["bytes_from_disk"]
    assert moved[kind] == bytes_for_each / 4 * moved[None]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_each_weight_is_told(kind: str, tmp_path: Path) -> None:
    dispatched = model(kind, "cpu", tmp_path)
    errors = quantization_errors(dispatched)
    names = {f"blocks.{n}.{layer}.weight" for n in range(3) for layer in ("up", "down")}
    assert names <= errors.keys() <= names | {"embed.weight", "head.weight"}
    assert all(0 < error.relative < 0.15 and 0 < error.largest < 0.3 for error in errors.values())
    counters = dispatched.dispatch_stats()[at(0)]
    assert counters["quantization_error_max"] == max(error.relative for error in errors.values())
    assert 0 < counters["quantization_error_mean"] <= counters["quantization_error_max"]
    undispatch(dispatched)
    assert quantization_errors(dispatched) == {}


@pytest.mark.slow
@alike("home", ["disk", "cpu"], first=1)
def test_the_models_own_weights_stay_exact(home: str, tmp_path: Path) -> None:
    exact = stack(**SIZES)
    dispatched = model("int4", home, tmp_path)
    dispatched(ids())
    for name, value in exact.state_dict().items():
        if name != "used":
            assert torch.equal(dispatched.state_dict()[name].cpu(), value), name
    save_model(dispatched, tmp_path / "saved")
    restored = undispatch(dispatched, "cpu")
    assert torch.equal(resident_output(restored, ids()), resident_output(stack(**SIZES), ids()))
    loaded = load_checkpoint_and_dispatch(stack(seed=5, **SIZES), tmp_path / "saved")
    assert torch.equal(loaded(ids()), exact(ids()))


@pytest.mark.slow
def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    dispatched = model("int8", "cpu", tmp_path)
    dispatched(ids())
    assert isinstance(dispatched, Stack)
    assert dispatched.head.weight is dispatched.embed.weight
    undispatch(dispatched)
    assert dispatched.head.weight is dispatched.embed.weight


@pytest.mark.slow
def test_weights_written_to_or_replaced_are_quantised_anew(tmp_path: Path) -> None:
    exact = stack(**SIZES)
    dispatched = model("int8", "cpu", tmp_path)
    assert isinstance(dispatched, Stack)
    dispatched(ids())
    with torch.no_grad():
        for each in (exact, dispatched):
            each.blocks[1].up.weight.mul_(-3)
            each.blocks[2].up.weight = nn.Parameter(each.blocks[2].up.weight.clone().neg_())
            each.blocks[0].up.bias.add_(1)
    assert distance(dispatched(ids()), resident_output(exact, ids())) < BOUND["int8"]


@pytest.mark.slow
def test_a_checkpoint_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    save_model(llama(), tmp_path / "model")
    llama().config.save_pretrained(tmp_path / "model")
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        exact = llama()(input_ids=tokens).logits
    for home in ("cpu", "disk"):
        loaded = from_pretrained(
            tmp_path / "model", {"": home}, main_device=at(0), offload_dtype="int8", offload_folder=tmp_path
        )
        with torch.no_grad():
            assert distance(loaded(input_ids=tokens).logits, exact) < 0.05
        assert quantization_errors(loaded)


@pytest.mark.slow
def test_casting_on_the_way_restores_into_the_dtype_that_is_computed_in(tmp_path: Path) -> None:
    save_model(stack(**SIZES), tmp_path)
    loaded = load_checkpoint_and_dispatch(
        stack(**SIZES), tmp_path, {"": "cpu"}, dtype="bfloat16", main_device=at(0), offload_dtype="int8"
    )
    output = loaded(ids())
    assert output.dtype == torch.bfloat16
    assert distance(output.float(), resident_output(stack(**SIZES), ids())) < 0.05


@pytest.mark.slow
def test_whole_models_can_be_offloaded_so(tmp_path: Path) -> None:
    exact = resident_output(stack(**SIZES), ids())
    from_memory = cpu_offload(stack(**SIZES), at(0), offload_dtype="int8")
    from_disk = disk_offload(stack(**SIZES), tmp_path, at(0), offload_dtype="int8")
    assert torch.equal(from_memory(ids()), from_disk(ids()))
    assert distance(from_memory(ids()), exact) < BOUND["int8"]


@pytest.mark.slow
def test_buffers_keep_what_a_forward_writes(tmp_path: Path) -> None:
    dispatched = dispatch_model(
        stack(**SIZES).train(), {"": "cpu"}, main_device=at(0), offload_buffers=True, offload_dtype="int8"
    )
    assert isinstance(dispatched, Stack)
    with torch.no_grad():
        dispatched(ids())
        dispatched(ids())
    assert int(dispatched.used) == 2
    assert int(dispatched.norm.num_batches_tracked or 0) == 2


def test_training_is_refused(tmp_path: Path) -> None:
    dispatched = model("int8", "cpu", tmp_path)
    with pytest.raises(DispatchError, match=r"weight cannot be trained.*without offload_dtype"):
        dispatched(ids()).sum().backward()
    with pytest.raises(DispatchError, match="for inference"):
        prepare_training(dispatched, dispatched.parameters())
    assert all(parameter.grad is None for parameter in dispatched.parameters())


def test_gradients_flow_through_weights_that_are_not_trained(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
    exact = torch.randn(2, WIDTH, generator=torch.manual_seed(0), requires_grad=True)
    rounded = exact.detach().clone().requires_grad_()
    block(exact).sum().backward()
    cpu_offload(block, at(0), offload_dtype="int8")
    block(rounded).sum().backward()
    assert exact.grad is not None
    assert rounded.grad is not None
    assert distance(rounded.grad, exact.grad) < BOUND["int8"]


def test_weights_on_disk_need_a_folder_for_their_quantised_form(tmp_path: Path) -> None:
    save_model(stack(**SIZES), tmp_path)
    plain = stack(**SIZES)
    with pytest.raises(DispatchError, match="offload_folder"):
        load_checkpoint_and_dispatch(plain, tmp_path, {"": "disk"}, main_device=at(0), offload_dtype="int8")
    assert torch.equal(plain(ids()), stack(**SIZES)(ids()))


def test_an_unknown_dtype_is_refused_before_anything_moves() -> None:
    plain = stack(**SIZES)
    with pytest.raises(PlanError, match="fp4"):
        dispatch_model(plain, {"": "cpu"}, main_device=at(0), offload_dtype="fp4")
    assert not hasattr(plain, "hf_device_map")


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(count)))


@exact
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_what_is_quantised_and_where_it_is_restored(kind: str) -> None:
    exact = 4 * 256 * 256
    budgets = {0: 4 * exact, "cpu": 6 * exact // 3}
    assert "disk" in make_plan(layers(8), budgets, main_device=0, context_length=0).device_map.values()
    planned = make_plan(layers(8), budgets, main_device=0, context_length=0, offload_dtype=kind)
    streamed = [name for name, key in planned.device_map.items() if key == "cpu"]
    assert set(planned.device_map.values()) == {0, "cpu"}
    model = dispatch_model(layers(8), planned, offload_dtype=kind)
    found = dispatched(model)
    assert found is not None
    (streamer,) = found.streamers
    carried = sum(block.carrier.nbytes for block in streamer.blocks if isinstance(block, QuantizedBlock))
    by_device = planned.devices
    assert by_device[0].slots == streamer.slot_bytes
    assert by_device["cpu"].weights == carried
    assert len(streamed) == len(streamer.blocks)
    assert memory_allocated(at(0)) == by_device[0].weights + by_device[0].slots
