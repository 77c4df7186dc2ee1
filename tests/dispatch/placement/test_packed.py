"""`host_kernels="packed"`: which weights the host computes packed, what they take, and what stays as it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigmodel import BudgetError, PlanError, dispatch_model, make_plan, save_model, undispatch
from bigmodel.dispatch import from_pretrained, get_plan
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.plan import Plan
from bigmodel.plan.memory.assignment import host_only
from bigmodel.plan.time.cost import CostModel
from bigmodel.profile import profile_source
from bigmodel.profile.machine.machine import Curve, nominal_machine

from ...accelerators import at
from ...examples import alike
from ...plan.machines import machine
from ...quantized.checkpoints import TOKENS, llama, published, qwen3_moe
from ...quantized.twins import Twin, fp8, packed, plain

PACKED: dict[str, Any] = {"host_kernels": "packed", "context_length": 16}
HOST = {"": "cpu"}
ROUNDINGS = 0.03
"""Largest difference of logits, relative to the largest logit: four roundings of bfloat16, of three layers of random
weights. The products themselves are held to their bounds in `test_host_kernels`."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of weights in int4, and the model that they stand for."""
    folder = tmp_path_factory.mktemp("int4") / "q"
    return folder, published(folder, packed(), num_hidden_layers=3)


@pytest.fixture
def folder(whole: tuple[Path, Any]) -> Path:
    return whole[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS.to(model.device)).logits.cpu()
    return found


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= ROUNDINGS * expected.abs().max())


def in_memory(model: Any) -> int:
    """Return the bytes of the parameters, with packed weights instead of the tensors that they were made of."""
    found = dispatched(model)
    assert found is not None
    packed = [weight for _, weight in found.packed.values()]
    displaced = {id(tensor) for weight in packed for tensor in weight.displaced}
    tensors = [parameter for parameter in model.parameters() if id(parameter) not in displaced]
    tensors += [tensor for weight in packed for tensor in (weight.integers, weight.scales)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.slow
@alike("twin", [packed(), plain("int8")], first=1, ids=lambda twin: twin.name)
def test_outputs_are_near_the_exact_ones_and_the_plan_counts_what_lies_in_memory(twin: Twin, tmp_path: Path) -> None:
    expected = logits(published(tmp_path / "q", twin, num_hidden_layers=3))
    model = from_pretrained(tmp_path / "q", max_memory={"cpu": "1GiB"}, **PACKED)
    found = logits(model)
    assert agree(found, expected)
    assert not torch.equal(found, expected)
    plan = get_plan(model)
    assert plan is not None
    assert plan.host_kernels == "packed"
    assert any(note.startswith("21 of 21 quantised linear layers are computed packed") for note in plan.notes)
    assert plan.devices["cpu"].weights == in_memory(model)
    assert Plan.from_json(plan.to_json()) == plan
    assert torch.equal(logits(undispatch(model)), expected)


@pytest.mark.slow
def test_stored_tensors_stay_parameters_and_are_saved_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    model = from_pretrained(folder, HOST, **PACKED)
    logits(model)
    before = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }
    save_model(model, tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


@pytest.mark.slow
def test_a_plan_is_obeyed_and_another_one_is_not_overruled(folder: Path) -> None:
    plan = make_plan(folder, {"cpu": "1GiB"}, **PACKED)
    model = from_pretrained(folder, plan)
    assert len(dispatched(model).packed) == 21  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="host_kernels is 'exact', but the plan has 'packed'"):
        from_pretrained(folder, plan, host_kernels="exact")


@pytest.mark.slow
def test_a_copy_of_the_model_is_packed_anew(folder: Path) -> None:
    model = from_pretrained(folder, HOST, **PACKED)
    second = copy.deepcopy(model)
    assert torch.equal(logits(second), logits(model))
    first, other = (dispatched(each).packed for each in (model, second))  # type: ignore[union-attr]
    assert first.keys() == other.keys()
    assert not any(other[name][1] is first[name][1] for name in first)


def test_nothing_is_packed_unless_it_is_asked_for(folder: Path) -> None:
    model = from_pretrained(folder, HOST)
    assert get_plan(model).host_kernels == "exact"  # type: ignore[union-attr]
    assert not dispatched(model).packed  # type: ignore[union-attr]


ENDS: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
MIXED = {**ENDS, "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk"}


def test_what_lies_on_disk_is_exact(whole: tuple[Path, Any]) -> None:
    assert torch.equal(logits(from_pretrained(whole[0], {"": "disk"}, **PACKED)), logits(whole[1]))


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_what_is_streamed_is_exact(whole: tuple[Path, Any]) -> None:
    expected = logits(copy.deepcopy(whole[1]).to(at(0)))
    assert torch.equal(logits(from_pretrained(whole[0], MIXED, **PACKED)), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_beside_an_accelerator_what_the_host_computes_from_ram_is_packed(whole: tuple[Path, Any]) -> None:
    model = from_pretrained(whole[0], MIXED, offload="compute", **PACKED)
    packed_layers = dispatched(model).packed  # type: ignore[union-attr]
    assert len(packed_layers) == 7
    assert all(name.startswith("model.layers.1.") for name in packed_layers)
    assert agree(logits(model), logits(whole[1]))


def test_stored_tensors_that_no_file_has_are_counted_beside_the_packed_weights(folder: Path) -> None:
    model = from_pretrained(folder, HOST, **PACKED)
    before = get_plan(model)
    assert before is not None
    undispatch(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    dispatch_model(model, HOST, host_kernels="packed")
    plan = get_plan(model)
    assert plan is not None
    kept = [name for name, _ in model.named_parameters() if name.endswith(("weight_packed", "weight_scale"))]
    beside = sum(model.get_parameter(name).nbytes for name in kept)
    assert plan.devices["cpu"].weights == before.devices["cpu"].weights + beside
    assert any(f"{len(kept)} stored tensors" in note for note in plan.notes)
    room = before.devices["cpu"].total + beside // 2
    with pytest.raises(BudgetError, match="of no file"):
        dispatch_model(model, HOST, host_kernels="packed", max_memory={"cpu": room})


@pytest.mark.parametrize(
    ("twin", "reason"),
    [
        (packed(group=16), r"model.layers.0.self_attn.q_proj cannot be computed so: .* groups of 32, 64, 128, 256"),
        (fp8(), r"q_proj cannot be computed so: it is stored as fp8"),
        (None, "no linear layer of this model has quantised weights"),
    ],
)
def test_a_model_without_a_weight_to_pack_is_refused_in_one_line(
    twin: Twin | None, reason: str, tmp_path: Path
) -> None:
    if twin is None:
        llama().to(torch.bfloat16).save_pretrained(tmp_path / "q")
    else:
        published(tmp_path / "q", twin, num_hidden_layers=3)
    for act in (lambda: make_plan(tmp_path / "q", **PACKED), lambda: from_pretrained(tmp_path / "q", HOST, **PACKED)):
        with pytest.raises(PlanError, match=reason) as refused:
            act()
        assert "\n" not in str(refused.value)
    with pytest.raises(PlanError, match="host_kernels is 'fast'; use one of exact, packed"):
        make_plan(tmp_path / "q", host_kernels="fast")


@pytest.mark.long
@pytest.mark.slow
def test_seconds_are_those_of_the_kernels_where_ram_holds_the_weights(folder: Path) -> None:
    def step(kernels: str, on_disk: str = "") -> float:
        profile = profile_source(folder, context_length=16, host_kernels=kernels)
        found = host_only(profile)
        storage = tuple("disk" if unit.name == on_disk else "cpu" for unit in profile.units)
        return CostModel(profile, nominal_machine()).seconds(1, replace(found, storage=storage)).seconds

    assert step("packed") < step("packed", "model.layers.1") < step("exact") == step("exact", "model.layers.1")


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_auto_leaves_a_part_to_the_host_where_its_kernels_are_faster_than_the_link(folder: Path) -> None:
    plain = machine(link=2e8, host=4e-9)
    kernels = {"product:int4": Curve((1.0,), (4e-10,), grows=True)}
    host = replace(plain.devices["cpu"], curves={**plain.devices["cpu"].curves, **kernels})
    fast = replace(plain, devices={**plain.devices, "cpu": host})

    def computed(host_kernels: str) -> set[str]:
        found = make_plan(
            folder,
            {0: 120_000, "cpu": "1GB"},
            offload="auto",
            per_pass=False,
            objective="latency",
            machine=fast,
            context_length=16,
            host_kernels=host_kernels,
        )
        layers = [part for part in found.parts if part.name.startswith("model.layers.")]
        assert any(part.device == "cpu" for part in layers)
        return {part.name for part in layers if part.runs_on == "cpu"}

    assert not computed("exact")
    assert computed("packed")


@pytest.mark.slow
def test_experts_are_restored_beside_packed_layers(tmp_path: Path) -> None:
    expected = logits(published(tmp_path / "q", packed(), qwen3_moe, num_hidden_layers=3))
    model = from_pretrained(tmp_path / "q", HOST, **PACKED)
    assert {name.rpartition(".")[2] for name in dispatched(model).packed} == {  # type: ignore[union-attr]
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert agree(logits(model), expected)
