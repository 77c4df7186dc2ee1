"""Maps as people give them, and what they become."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bigmodel.dispatch import cpu_offload, dispatch_model, get_plan, undispatch
from bigmodel.dispatch.placement.options import PlanArguments
from bigmodel.dispatch.placement.resolve import resolve_device_map
from bigmodel.errors import DeviceError, PlanError
from bigmodel.limits import STAGING_BYTES
from bigmodel.plan import plan, planner
from bigmodel.profile.machine.machine import nominal_machine

from ...accelerators import at, exact
from ...examples import alike
from ..models import in_turns, llama, stack

TOKENS = torch.arange(8).view(2, 4)


def test_one_device_is_for_the_whole_model() -> None:
    assert resolve_device_map(stack(), "cpu").devices == {"": "cpu"}
    assert resolve_device_map(stack(), torch.device("cpu")).keys == {"": "cpu"}


def test_a_word_that_is_neither_a_strategy_nor_a_device_is_told_what_there_is() -> None:
    with pytest.raises(DeviceError, match=r"'balanced_high', which is neither a strategy \(auto, .*\) nor a device"):
        resolve_device_map(stack(), "balanced_high")


@pytest.mark.parametrize("device_map", ["cuda:77", {"": "cuda:77"}, {"0": "cpu", "": "virtual:77"}])
def test_a_device_that_is_not_present_is_named_with_those_that_are(device_map: object) -> None:
    with pytest.raises(DeviceError, match=r"^device '(cuda|virtual):77' is not present; this machine has .*'cpu'.*$"):
        dispatch_model(stack(), device_map)  # type: ignore[arg-type]


def test_a_main_device_that_is_not_present_is_named() -> None:
    with pytest.raises(DeviceError, match="device 'cuda:77' is not present"):
        dispatch_model(stack(), "cpu", main_device="cuda:77")
    with pytest.raises(DeviceError, match="device 'cuda:77' is not present"):
        cpu_offload(stack(), "cuda:77")


@pytest.mark.usefixtures("every_accelerator")
def test_a_named_strategy_becomes_a_plan() -> None:
    found = resolve_device_map(stack(), "auto", PlanArguments.read(max_memory={0: "1GB", "cpu": "1GB"}))
    assert found.keys == found.plan.device_map
    assert found.placement.main_device == at(0)


def test_more_readers_of_a_given_map_have_more_memory_to_read_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "usable_cores", lambda: 8)
    found = get_plan(dispatch_model(stack(3), {"": "cpu"}))
    assert (found.readers, found.staging_bytes) == (4, 2 * STAGING_BYTES)


@pytest.mark.usefixtures("accelerators")
def test_a_plan_says_to_which_accelerator_each_part_is_streamed() -> None:
    model = stack()
    made = in_turns(model, "blocks")
    placement = resolve_device_map(model, made).placement
    assert [placement.execution_device(f"blocks.{turn}") for turn in range(4)] == ["virtual:0", "virtual:1"] * 2
    assert {placement.storage_device(f"blocks.{turn}") for turn in range(4)} == {"cpu"}
    missing = replace(made, parts=tuple(replace(p, runs_on=7 if p.runs_on == 1 else p.runs_on) for p in made.parts))
    with pytest.raises(DeviceError, match=r"device (7|'virtual:7')"):
        resolve_device_map(model, missing)


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@alike("held", ["cpu", "disk"], first=1)
@exact
def test_modules_compute_on_the_host_beside_an_accelerator(held: str, tmp_path: object) -> None:
    model = llama(layers=2)
    expected = model(TOKENS).logits
    names = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{n}" for n in range(2)),
    ]
    device_map = {name: held if name.endswith("layers.1") else 0 for name in names}
    dispatch_model(model, device_map, offload_dir=str(tmp_path), offload="compute")
    seen = []
    layer = model.model.layers[1]
    layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(str(kwargs["hidden_states"].device)), with_kwargs=True
    )
    torch.testing.assert_close(model(TOKENS).logits, expected)
    assert seen == ["cpu"]
    assert {str(p.device) for p in layer.parameters()} == {"cpu"}
    assert at(0) not in model.dispatch_stats(), "nothing is streamed"
    new = model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(new, undispatch(model).generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0))


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@alike("offload", ["compute", "stream"], first=1)
@exact
def test_a_plan_is_a_device_map_and_says_what_the_host_computes(offload: str) -> None:
    model = llama(layers=4)
    expected = model(TOKENS).logits
    weights = sum(p.nbytes for p in model.parameters())
    budgets = {0: int(0.6 * weights), "cpu": "1GB"}
    made = plan(model, budgets, batch_size=2, context_length=4, offload=offload, machine=nominal_machine())
    on_host = {name for name, device in made.execution.items() if device == "cpu" and "layers" in name}
    assert bool(on_host) == (offload == "compute")
    dispatch_model(model, made)
    assert get_plan(model) is made
    assert model.hf_device_map == made.device_map
    torch.testing.assert_close(model(TOKENS).logits, expected)
    assert (at(0) in model.dispatch_stats()) == (offload == "stream")


@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize(
    ("device_map", "offload", "said"),
    [("auto", "sometimes", "'sometimes'"), ("balanced", "auto", "'balanced'"), ({"": "cpu"}, "auto", "a plan")],
)
def test_arguments_that_exclude_each_other_are_refused(device_map: object, offload: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        dispatch_model(stack(), device_map, offload=offload)  # type: ignore[arg-type]
