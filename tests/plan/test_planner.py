"""`plan`: which parts it leaves where, that budgets hold and bytes are exact, what it predicts, what it refuses."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as t
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import virtual
from bigmodel.errors import BudgetError, DeviceError, PlanError, SizeError
from bigmodel.limits import KV_PAGE, KV_SPARE_PAGES, MOST_READERS, READERS, STAGING_BYTES
from bigmodel.plan import STRATEGIES, Plan, check_device_map, make_plan, plan, planner
from bigmodel.plan.memory.assignment import Assignment, memory_usage
from bigmodel.plan.memory.host_kv import with_kv_on_host
from bigmodel.plan.planner import reader_count, without_garbage_collection
from bigmodel.plan.time.cost import CostModel
from bigmodel.profile import Profile, find_tied_parameters, named_tensors, profile_model
from bigmodel.profile.model.tensors import owner_of
from tests.examples import few

from ..profile.models import Flat, Stack, on_meta, tiny_llama
from .machines import llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")

DEEP = {"num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 256}
MACHINE = machine()


def profile(context: int = 32) -> Profile:
    return llama_profile(context, new_tokens=2, **DEEP)


def assignment_of(found: Plan, of: Profile) -> Assignment:
    """The plan's own words as an assignment: what a dispatcher reads from it."""
    storage = tuple(found.device_map.get(unit.name, found.main_device) for unit in of.units)
    execution = tuple(found.execution.get(unit.name, found.main_device) for unit in of.units)
    return Assignment(
        storage, execution, found.main_device, found.slots, found.slot_bytes, staging_bytes=found.staging_bytes
    )


def measured_weights(model: nn.Module, made: Plan) -> dict[object, int]:
    """Bytes of parameters on each device of the map, tied ones once per device: the slow, obvious way."""
    found: dict[object, dict[int, int]] = {}
    for name, tensor, is_buffer, _ in named_tensors(model):
        if not is_buffer:
            device = made.device_map[str(owner_of(name, made.device_map))]
            found.setdefault(device, {})[id(tensor)] = tensor.nbytes
    return {device: sum(sizes.values()) for device, sizes in found.items()}


def assert_sound(model: nn.Module, made: Plan, budgets: dict[int | str, int]) -> None:
    check_device_map(model, made.device_map)
    for device, planned in made.devices.items():
        assert planned.total <= (planned.total if planned.budget is None else planned.budget)
        assert planned.budget == budgets.get(device) or not planned.weights
    weights = {device: planned.weights for device, planned in made.devices.items() if planned.weights}
    assert weights == measured_weights(model, made)
    for names in find_tied_parameters(model):
        assert len({made.device_map[str(owner_of(name, made.device_map))] for name in names}) == 1


@pytest.mark.slow
def test_streamed_blocks_lie_between_resident_ones_and_the_step_is_shorter_than_greedily() -> None:
    of = profile()
    budget = {0: of.weights * 3 // 5 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    fast = machine(link=1.5e10)
    found, greedy = plan(of, budget, machine=fast), plan(of, budget, objective="fit", machine=fast)
    assert found.prediction is not None
    assert greedy.prediction is not None
    assert found.prediction.token < greedy.prediction.token
    assert found.streamed


@pytest.mark.slow
def test_the_prediction_is_that_of_the_cost_model_for_the_plan() -> None:
    of = profile()
    found = plan(of, {0: of.weights // 2 + of.activations, "cpu": "1GB"}, machine=MACHINE)
    cost = CostModel(of, MACHINE)
    assert found.prediction is not None
    assert found.prediction.prefill == cost.seconds(0, assignment_of(found, of)).seconds
    assert found.prediction.token == cost.seconds(1, assignment_of(found, of)).seconds


@pytest.mark.slow
def test_the_link_is_named_as_the_bottleneck_and_one_more_gib_saves_time() -> None:
    of = profile()
    found = plan(of, {0: of.weights // 2 + of.activations, "cpu": "1GB"}, machine=machine(link=1e6))
    assert found.prediction is not None
    assert "link" in found.prediction.binds
    assert found.prediction.seconds_saved_per_gib[0] > 0
    assert "would take" in found.explain()


def test_a_model_that_fits_is_resident_and_compute_bound() -> None:
    found = plan(profile(), {0: "1GB", "cpu": "1GB"}, machine=MACHINE)
    assert set(found.device_map.values()) == {0}
    assert found.prediction is not None
    assert found.prediction.binds.startswith("computing")
    assert found.prediction.seconds_saved_per_gib[0] == 0


@pytest.mark.slow
def test_blocks_are_computed_on_the_cpu_only_if_offload_allows_it() -> None:
    of = profile()
    budget = {0: of.weights // 2 + of.activations, "cpu": "1GB"}
    slow_link = machine(link=1e6)
    streamed, computed = (plan(of, budget, offload=offload, machine=slow_link) for offload in ("stream", "compute"))
    auto = plan(of, budget, offload="auto", machine=slow_link)
    assert all(part.runs_on == 0 for part in streamed.parts if "layers" in part.name)
    assert {part.runs_on for part in computed.parts if "layers" in part.name} == {0, "cpu"}
    assert auto.prediction is not None
    assert computed.prediction is not None
    assert streamed.prediction is not None
    assert auto.prediction.token <= computed.prediction.token < streamed.prediction.token


@pytest.mark.slow
def test_throughput_includes_the_prompt() -> None:
    of = llama_profile(256, new_tokens=2, **DEEP | {"num_hidden_layers": 3})
    budget = {0: of.weights // 2 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    found = {
        name: plan(of, budget, objective=name, offload="auto", machine=MACHINE) for name in ("latency", "throughput")
    }

    def job(one: Plan) -> float:
        assert one.prediction is not None
        assert one.prediction.prefill is not None
        return one.prediction.prefill + one.prediction.token

    assert job(found["throughput"]) <= job(found["latency"]) + 1e-12


def test_a_plan_with_a_prediction_is_equal_after_json() -> None:
    found = plan(profile(), {0: "2MB", "cpu": "1GB"}, machine=MACHINE)
    assert found.prediction is not None
    assert Plan.from_json(found.to_json()) == found
    assert "predicted:" in str(found)


def test_no_time_is_predicted_for_devices_of_another_machine() -> None:
    virtual.disable()
    found = plan(profile(), {0: "3MB", "cpu": "1GB"}, objective="latency")
    assert found.prediction is None
    assert any("no time is predicted" in note for note in found.notes)


def test_a_plan_without_a_prediction_keeps_its_other_notes() -> None:
    virtual.disable()
    found = plan(replace(profile(), unknown="images are not known"), {0: "3MB", "cpu": "1GB"}, objective="latency")
    assert any("images are not known" in note for note in found.notes)


def test_a_model_of_unknown_inputs_is_planned_greedily_without_time() -> None:
    model = on_meta(Stack, depth=6)
    found = plan(model, {0: 20_000, "cpu": 10**6}, machine=MACHINE)
    assert found.prediction is None
    assert found.device_map == make_plan(model, {0: 20_000, "cpu": 10**6}).device_map


@pytest.mark.slow
@settings(max_examples=few(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(1_000_001, 1_330_001, 57_677, "stream", 1e6)  # keys and values lie on the host
@given(
    st.integers(0, 6_000_000),
    st.one_of(st.none(), st.integers(0, 6_000_000)),
    st.integers(0, 8_000_000),
    st.sampled_from(["stream", "auto"]),
    st.sampled_from([1e6, 1e9]),
)
def test_budgets_hold_and_nothing_is_slower_than_accelerates_order(
    first: int, second: int | None, host: int, offload: str, link: float
) -> None:
    of = profile(16)
    budgets: dict[int | str, int] = {0: first, "cpu": host, **({} if second is None else {1: second})}
    speeds = machine(link=link)
    try:
        found = plan(of, budgets, offload=offload, machine=speeds)
    except BudgetError:
        return
    on_host = {part.name for part in found.parts if part.kv_on_host}
    beside = [index for index, unit in enumerate(of.units) if unit.name in on_host]
    held = with_kv_on_host(of, beside, found.kv_in_ram) if beside else of
    assert memory_usage(held, assignment_of(found, of)).over(budgets) == {}
    theirs = in_accelerates_order(of, budgets)
    if theirs is not None and found.prediction is not None:
        assert found.prediction.token <= CostModel(of, speeds).seconds(1, theirs).seconds * (1 + 1e-9)


def in_accelerates_order(of: Profile, budgets: dict[int | str, int]) -> Assignment | None:
    """The map that accelerate makes, weights only and in order, of budgets less what else is needed, as its users are
    told to choose them; None if it would not hold the budgets all the same."""
    from accelerate import infer_auto_device_map

    slots = 2 * max(unit.slot_bytes() for unit in of.units)
    beside = of.activations + sum(of.kv_cache) + of.buffers + slots
    given = {key: max(budgets[key] - beside, 0) for key in (0, 1, "cpu") if key in budgets}
    device_map = infer_auto_device_map(tiny_llama(**DEEP), given, no_split_module_classes=["LlamaDecoderLayer"])
    storage = []
    for unit in of.units:
        key = next((key for key in _prefixes(unit.name) if key in device_map), None)
        storage.append(device_map[key] if key is not None else 0)
    accelerators = [key for key in storage if isinstance(key, int)]
    if not accelerators:
        return None
    main = min(accelerators)
    execution = [key if isinstance(key, int) else main for key in storage]
    slot_sizes = [unit.slot_bytes() for unit, key in zip(of.units, storage, strict=True) if not isinstance(key, int)]
    found = Assignment(tuple(storage), tuple(execution), main, min(2, len(slot_sizes)), max(slot_sizes, default=0))
    return None if memory_usage(of, found).over(budgets) else found


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("strategy", ["auto"]),
        ("strategy", "fastest"),
        ("objective", ["latency"]),
        ("objective", "speed"),
        ("offload", "sometimes"),
        ("offload_dtype", ""),
        ("offload_dtype", 4),
        ("offload_dtype", torch.ones(2)),
        ("offload", None),
        ("offload_buffers", "yes"),
        ("per_pass", 3),
        ("slots", 0),
        ("slots", 1.5),
        ("slots", float("nan")),
        ("machine", "this one"),
        ("model", 3),
    ],
)
def test_an_invalid_argument_is_named(argument: str, value: Any) -> None:
    given: dict[str, Any] = {"model": llama_profile(), "max_memory": {"cpu": "1GB"}, argument: value}
    with pytest.raises(PlanError, match=argument):
        plan(**given)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", float("nan")),
        ("batch_size", 2**31),
        ("context_length", "16"),
        ("new_tokens", 1.5),
        ("no_split_module_classes", {"Layer": 1}),
    ],
)
def test_an_invalid_shape_is_named(argument: str, value: Any) -> None:
    with pytest.raises(PlanError, match=argument):
        plan(tiny_llama(), {"cpu": "1GB"}, **{argument: value})


def test_a_search_objective_contradicts_a_strategy_that_does_not_search() -> None:
    with pytest.raises(PlanError, match=r"strategy='sequential'.*objective='latency'"):
        plan(llama_profile(), {0: "1GB"}, "sequential", objective="latency")


@pytest.mark.slow
def test_a_strategy_without_search_is_predicted_with_the_objective_fit() -> None:
    of = profile()
    budget = {0: of.weights // 2 + of.activations, "cpu": "1GB"}
    found = plan(of, budget, "sequential", objective="fit", machine=MACHINE)
    assert found.prediction is not None
    assert found.device_map == plan(of, budget, "sequential").device_map


def test_the_top_level_name_is_the_same_function() -> None:
    assert make_plan is plan


def test_garbage_collection_is_paused_and_resumed_also_after_an_error() -> None:
    with pytest.raises(ValueError), without_garbage_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_disabled_garbage_collection_stays_disabled() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_of_a_model_that_fits_is_streamed() -> None:
    made = make_plan(llama_profile(), {0: "10MB", "cpu": "10MB"})
    assert set(made.device_map.values()) == {0}
    assert made.streamed == ()
    assert made.slots == 0


def test_the_map_is_in_the_order_the_parts_run() -> None:
    names = list(make_plan(llama_profile(), {"cpu": "10MB"}).device_map)
    assert names[0] == "model.embed_tokens"
    assert names[-1] == "lm_head"
    assert names.index("model.rotary_emb") < names.index("model.layers.0")


def test_without_accelerators_the_cpu_runs_everything_and_parts_beyond_ram_are_on_disk() -> None:
    made = make_plan(llama_profile(), {"cpu": "500kB"})
    assert set(made.execution.values()) == {"cpu"}
    assert set(made.device_map.values()) == {"cpu", "disk"}
    assert_sound(tiny_llama(), made, {"cpu": 500_000})


@pytest.mark.slow
def test_nothing_stays_on_disk_that_fits_ram_where_computing_takes_longer_than_reading() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = on_meta(t.LlamaForCausalLM, t.LlamaConfig(**sizes, vocab_size=3000, tie_word_embeddings=False))
    fast = replace(machine(host=4e-9), disk_cold=1e15, disk_warm=1e15)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = plan(model, {0: "100KB", "cpu": int(0.8 * weights), "disk": "1GB"}, machine=fast, context_length=64)
    on_disk = [part.bytes for part in found.parts if part.device == "disk"]
    assert on_disk
    assert found.devices["cpu"].budget - found.devices["cpu"].total < min(filter(None, on_disk))


@pytest.mark.slow
def test_streamed_blocks_have_two_slots_on_the_main_device() -> None:
    model = tiny_llama(num_hidden_layers=12, hidden_size=128, intermediate_size=512)
    made = make_plan(model, {0: "4MB", "cpu": "100MB"}, context_length=16)
    assert made.slots == 2
    assert len(made.streamed) > 1
    assert made.devices[0].slots == 2 * made.slot_bytes
    assert made.slot_bytes >= max(part.bytes for part in made.streamed)
    assert_sound(model, made, {0: 4_000_000, "cpu": 100_000_000})


@pytest.mark.slow
def test_embeddings_that_are_not_resident_are_looked_up_on_the_host() -> None:
    model = tiny_llama(vocab_size=20_000)
    made = make_plan(model, {0: "8MB", "cpu": "100MB"}, context_length=16)
    assert (made.device_map["model.embed_tokens"], made.execution["model.embed_tokens"]) == ("cpu", "cpu")
    assert made.device_map["lm_head"] == 0


@pytest.mark.slow
def test_kv_cache_and_activations_count_against_the_device_that_runs_the_layer() -> None:
    profile = llama_profile(256, batch_size=2, num_hidden_layers=8)
    each = (profile.weights + sum(profile.kv_cache)) * 2 // 3 + profile.activations
    made = make_plan(profile, {0: each, 1: each})
    assert sum(device.kv_cache for device in made.devices.values()) == sum(profile.kv_cache)
    for device in (0, 1):
        layers = [name for name, at in made.execution.items() if at == device and "layers" in name]
        assert made.devices[device].kv_cache == len(layers) * max(profile.kv_cache)
        assert made.devices[device].activations > 0
    assert_sound(tiny_llama(num_hidden_layers=8), made, {0: each, 1: each})


@pytest.mark.slow
def test_balanced_fills_evenly_and_low_zero_spares_the_first_device() -> None:
    budgets = {0: "8MB", 1: "8MB"}
    even, low, ordered = (
        make_plan(llama_profile(num_hidden_layers=8), budgets, strategy)
        for strategy in ("balanced", "balanced_low_0", "sequential")
    )
    assert abs(even.devices[0].weights - even.devices[1].weights) < 200_000
    assert low.devices[0].weights == 0
    assert ordered.devices[1].weights == 0


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0"])
def test_balanced_leaves_nothing_to_the_host_where_much_of_the_model_must_be_on_one_accelerator(strategy: str) -> None:
    class Mixed(nn.Module):
        """Multiplies by parameters of its own, half of its bytes, before and behind its blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ParameterList(torch.ones(32, 32) for _ in range(4))
            self.blocks = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
            self.last = nn.ParameterDict({"scale": torch.ones(32)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.first:
                x = x @ weight
            return self.blocks(x) * self.last["scale"]

    found = make_plan(Mixed(), {0: "1MB", 1: "1MB", "cpu": "1GB"}, strategy, sample_inputs=(torch.ones(4, 32),))
    assert set(found.device_map.values()) == {0, 1}


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_another_accelerator_runs_blocks_that_are_too_large_for_the_first(strategy: str) -> None:
    model = on_meta(Stack, width=64, depth=4)
    block = sum(p.nbytes for p in model.blocks[0].parameters())  # type: ignore[index]
    found = make_plan(model, {0: block - 1, 1: 3 * block, "cpu": 2**30}, strategy, context_length=0)
    assert found.main_device == 1
    assert {found.execution[f"blocks.{index}"] for index in range(4)} == {1}
    assert list(found.device_map.values()).count("cpu") > 0
    assert all(use.total <= use.budget for use in found.devices.values() if use.budget is not None)


@pytest.mark.slow
def test_the_main_device_can_be_chosen() -> None:
    profile = llama_profile(num_hidden_layers=12)
    made = make_plan(profile, {0: "600kB", 1: "600kB", "cpu": "100MB"}, main_device="virtual:1")
    assert made.main_device == 1
    assert {part.runs_on for part in made.streamed} == {1}


def test_a_main_device_without_a_budget_is_refused() -> None:
    with pytest.raises(PlanError, match="main_device"):
        make_plan(Flat(), {0: 1000}, main_device=1)


def test_direct_tensors_of_a_split_module_are_on_the_main_device() -> None:
    model = on_meta(Stack, width=32, depth=8, direct=True)
    made = make_plan(model, {0: 120_000, "cpu": 10**6})
    assert made.device_map["scale"] == made.device_map["offset"] == 0
    assert "cpu" in made.device_map.values()
    assert_sound(model, made, {0: 120_000, "cpu": 10**6})


@pytest.mark.slow
def test_tied_embeddings_are_on_one_device() -> None:
    profile = llama_profile(tie_word_embeddings=True, vocab_size=4000)
    for budget in ("900kB", "3MB", "6MB"):
        made = make_plan(profile, {0: budget, "cpu": "100MB"})
        assert made.device_map["model.embed_tokens"] == made.device_map["lm_head"]


@pytest.mark.slow
def test_dense_and_expert_layers_share_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.plan.search.search.EXACT", 0)  # which takes half a second
    config = t.DeepseekV3Config(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=6, n_routed_experts=8,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8,
        v_head_dim=8, qk_nope_head_dim=8, n_group=2, topk_group=1, num_experts_per_tok=2, vocab_size=64,
        first_k_dense_replace=2,
    )  # fmt: skip
    model = on_meta(t.DeepseekV3ForCausalLM, config)
    made = make_plan(model, {0: "900kB", "cpu": "100MB"}, context_length=16)
    assert made.slot_bytes >= max(part.bytes for part in made.streamed)
    assert_sound(model, made, {0: 900_000, "cpu": 100_000_000})


@pytest.mark.slow
def test_encoder_and_decoder_are_planned_together() -> None:
    config = t.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=4, num_heads=4, vocab_size=64)
    model = on_meta(t.T5ForConditionalGeneration, config)
    made = make_plan(model, {0: "300kB", "cpu": "100MB"}, context_length=32, new_tokens=8)
    assert_sound(model, made, {0: 300_000, "cpu": 100_000_000})
    assert made.devices[0].kv_cache > 0


def test_a_device_with_a_budget_of_zero_is_not_used() -> None:
    made = make_plan(llama_profile(), {0: 0, 1: "10MB", "cpu": 0})
    assert set(made.device_map.values()) == {1}
    assert made.main_device == 1


@pytest.mark.parametrize("main_device", [None, 0])
def test_a_plan_says_that_it_leaves_all_accelerators_idle(main_device: int | None) -> None:
    profile = llama_profile()
    idle = make_plan(profile, {0: "1KB", "cpu": "100MB"}, main_device=main_device)
    assert set(idle.execution.values()) == {"cpu"}
    [note] = [note for note in idle.notes if "the CPU runs everything" in note]
    assert "virtual:0 (1000 B)" in note
    assert note in idle.explain()
    for budgets in ({0: "100MB", "cpu": "100MB"}, {0: 0, "cpu": "100MB"}, {"cpu": "100MB"}):
        assert not any("the CPU runs everything" in note for note in make_plan(profile, budgets).notes)


def test_a_model_that_does_not_fit_is_an_error_with_sufficient_budgets() -> None:
    profile = llama_profile()
    with pytest.raises(BudgetError) as caught:
        make_plan(profile, {"cpu": "100kB", "disk": 0})
    text = str(caught.value)
    enough = int(text.split("'cpu': ")[2].split("(")[1].split(" bytes")[0])
    assert make_plan(profile, {"cpu": enough, "disk": 0})
    with pytest.raises(BudgetError):
        make_plan(profile, {"cpu": enough - 1, "disk": 0})


@pytest.mark.parametrize("budgets", [{0: -1}, {0: "many"}, {"cpu": "10 GiBs"}])
def test_budgets_that_are_not_sizes_are_refused(budgets: dict[int | str, int | str]) -> None:
    with pytest.raises(SizeError):
        make_plan(Flat(), budgets)


def test_unknown_activations_are_noted_in_the_plan() -> None:
    class Choosy(Stack):
        def forward(self, ids):  # type: ignore[no-untyped-def]
            return ids[: int(ids.sum())]

    model = Choosy()
    model.config, model.main_input_name = t.LlamaConfig(), "input_ids"
    assert any("not known" in note for note in make_plan(model, {"cpu": 10**6}, context_length=8).notes)


@pytest.mark.slow
@settings(max_examples=few(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(0, 700_000), min_size=0, max_size=2),
    st.integers(0, 700_000),
    st.booleans(),
    st.sampled_from([0, 16, 64]),
)
def test_any_budgets_hold_and_bytes_are_exact(
    strategy: str, accelerators: list[int], host: int, tied: bool, context: int
) -> None:
    budgets: dict[int | str, int] = {**dict(enumerate(accelerators)), "cpu": host}
    try:
        made = make_plan(llama_profile(context, tie_word_embeddings=tied), budgets, strategy)
    except BudgetError:
        return
    assert_sound(tiny_llama(tie_word_embeddings=tied), made, budgets)
    assert {part.name for part in made.parts} == set(made.device_map)


@pytest.mark.slow
def test_a_host_with_a_budget_of_0_holds_no_weights_and_limits_nothing_that_passes_through() -> None:
    made = make_plan(llama_profile(16), {0: 502_580, "cpu": 0})
    assert {part.device for part in made.streamed} == {"disk"}
    assert made.devices["cpu"].weights == 0
    assert made.devices["cpu"].total > 0
    assert made.devices["cpu"].budget is None


@pytest.mark.slow
def test_a_profile_gives_the_plan_of_its_model() -> None:
    assert make_plan(llama_profile(), {0: "10MB"}) == make_plan(tiny_llama(), {0: "10MB"}, context_length=32)


def test_free_memory_less_headroom_is_the_default_budget() -> None:
    virtual.configure(0, "10MB")
    virtual.configure(1, "10MB")
    made = make_plan(llama_profile())
    assert made.devices[0].budget == 9_000_000


@pytest.mark.slow
def test_auto_searches_if_something_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = machine(link=1.5e10)
    monkeypatch.setattr(planner, "known_machine", lambda: fast)
    of = profile()
    budgets = {0: of.weights * 3 // 5 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    found = make_plan(of, budgets)
    assert found.device_map == plan(of, budgets, machine=fast).device_map
    assert found.device_map != plan(of, budgets, machine=fast, objective="fit").device_map
    assert make_plan(of, budgets, "sequential").device_map != found.device_map


@pytest.mark.parametrize(
    "budgets", ["cpu=1GB", {"cpu": float("nan")}, {"cpu": 10**40}, {None: 1}, {"gpu": 1}, {True: 1}]
)
def test_budgets_with_invalid_devices_or_sizes_are_refused(budgets: object) -> None:
    with pytest.raises((SizeError, DeviceError)):
        make_plan(Flat(), budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize("main_device", [True, 1.5, b"cpu", "gpu"])
def test_an_invalid_main_device_is_refused(main_device: object) -> None:
    with pytest.raises((PlanError, DeviceError)):
        make_plan(Flat(), {0: 1000, 1: 1000}, main_device=main_device)  # type: ignore[arg-type]


def test_the_machine_profile_is_not_read_if_nothing_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "known_machine", lambda: pytest.fail("the machine was asked"))
    assert make_plan(llama_profile(), {0: "10MB", "cpu": "10MB"}).streamed == ()
    assert make_plan(Flat(), {"cpu": "10MB"}).streamed == ()


@pytest.mark.slow
def test_the_host_computes_slowly_streamed_blocks_only_with_offload_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "known_machine", lambda: machine(link=1e5))
    profile = llama_profile(num_hidden_layers=8)
    budgets = {0: profile.weights // 2 + profile.activations + sum(profile.kv_cache), "cpu": "1GB"}
    layers = {name for name in make_plan(profile, budgets).device_map if "layers" in name}
    for offload in ("stream", "auto"):
        runs_on = make_plan(profile, budgets, offload=offload).execution
        assert ("cpu" in {runs_on[name] for name in layers}) is (offload == "auto")


def test_a_strict_plan_refuses_a_model_of_unknown_inputs() -> None:
    budgets = {0: "1MB", "cpu": "1GB"}
    assert any("sample_inputs" in note for note in plan(Flat(), budgets).notes)
    with pytest.raises(PlanError, match="give sample_inputs"):
        plan(Flat(), budgets, strict=True)
    known = plan(Flat(), budgets, strict=True, sample_inputs=(torch.empty(20, 3, device="meta"),))
    assert known.notes == ()
    assert known.devices[0].activations >= 20 * (4 + 5) * 4


def test_sample_inputs_that_do_not_suffice_are_not_asked_for() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x)[: int(x.sum())]
            return found

    notes = plan(Reading(), {0: "1MB", "cpu": "1GB"}, sample_inputs=(torch.ones(20, 3),)).notes
    assert any("needs more than the shapes of sample_inputs" in note for note in notes)
    assert not any("give sample_inputs" in note for note in notes)


def test_sample_inputs_beside_a_profile_are_refused() -> None:
    with pytest.raises(PlanError, match="profile"):
        plan(profile_model(Flat()), {"cpu": "1GB"}, sample_inputs=(torch.empty(2, 3),))


def test_threads_that_read_from_disk_are_as_many_as_the_machine_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured; else by its cores. Staging memory grows with them, within half of the host's budget."""
    measured = replace(machine(), readers=4)
    assert reader_count(measured) == 4
    assert reader_count(machine()) == READERS, "of another machine nothing is known"
    for cores, readers in ((1, READERS), (8, 4), (256, MOST_READERS)):
        monkeypatch.setattr(planner, "usable_cores", lambda cores=cores: cores)
        assert reader_count() == readers
    found = plan(llama_profile(), {"cpu": 10**9}, machine=measured, objective="fit")
    assert (found.readers, found.staging_bytes) == (4, 2 * STAGING_BYTES)


def long_profile() -> Profile:
    """Sixteen layers whose keys and values take three times their weights."""
    return llama_profile(2048, 1900, max_position_embeddings=4096, num_hidden_layers=16)


@pytest.mark.slow
def test_keys_and_values_lie_on_the_host_where_the_device_cannot_hold_them() -> None:
    budgets: dict[int | str, int] = {0: 4_000_000, "cpu": 10**9}
    made = plan(long_profile(), budgets)
    assert sum(long_profile().kv_cache) > budgets[0]
    assert made.kv_on_host == tuple(f"model.layers.{index}" for index in range(16))
    assert all(part.runs_on == 0 for part in made.parts if part.kv_on_host)
    assert made.devices["cpu"].kv_cache == sum(long_profile().kv_cache)
    assert made.devices[0].kv_cache == 0
    assert made.devices[0].kv_slots == made.kv_slots * max(long_profile().kv_cache)
    assert made.devices[0].total <= budgets[0]
    assert Plan.from_json(made.to_json()) == made
    assert "KV in RAM" in str(made)
    assert "Keys and values of 16 parts lie in RAM" in made.explain()


@pytest.mark.slow
def test_no_more_keys_and_values_lie_on_the_host_than_must() -> None:
    more = [len(plan(long_profile(), {0: budget, "cpu": 10**9}).kv_on_host) for budget in (6 * 10**6, 10**7, 10**8)]
    assert 16 > more[0] > more[1] >= more[2] == 0


@pytest.mark.slow
def test_keys_and_values_on_the_host_are_counted_in_the_time_of_a_step() -> None:
    link = 1e9
    made = plan(long_profile(), {0: 4_000_000, "cpu": 10**9}, machine=machine(link=link, host=1e-7))
    assert made.kv_on_host
    assert made.prediction is not None
    streamed = sum(part.bytes for part in made.streamed)
    assert made.prediction.token >= (sum(long_profile().kv_cache) + streamed) / link


@cache
def on_disk_of(host: int, **more: int) -> Plan:
    return plan(long_profile(), {0: 4_000_000, "cpu": host, **more})


@pytest.mark.slow
def test_older_keys_and_values_lie_on_disk_where_ram_cannot_hold_them() -> None:
    whole = sum(long_profile().kv_cache)
    made = on_disk_of(whole // 4)
    held, there = made.devices["cpu"], made.devices["disk"]
    assert 0 < made.kv_in_ram <= long_profile().workload.context_length // 4
    assert made.kv_on_disk == there.kv_cache >= whole - held.kv_cache > whole // 2
    assert held.total <= whole // 4
    assert made.devices[0].total <= 4_000_000
    assert Plan.from_json(made.to_json()) == made
    assert "KV in RAM and on disk" in " ".join(str(made).split())
    assert f"RAM holds those of the last {made.kv_in_ram} tokens" in made.explain()


@pytest.mark.slow
def test_ram_holds_as_many_keys_and_values_as_it_has_room_for() -> None:
    whole = sum(long_profile().kv_cache)
    shares = [on_disk_of(whole * share // 8).kv_on_disk for share in (2, 4, 6)]
    assert shares[0] > shares[1] > shares[2] > 0
    assert not on_disk_of(4 * whole).kv_on_disk


@pytest.mark.slow
def test_the_budget_of_the_disk_holds_for_keys_and_values() -> None:
    whole = sum(long_profile().kv_cache)
    with pytest.raises(BudgetError):
        on_disk_of(whole // 4, disk=whole // 4)
    assert on_disk_of(whole // 4, disk=2 * whole).devices["disk"].budget == 2 * whole


def of_engine(host: int, **more: int) -> Plan:
    return plan(long_profile(), {0: 6_000_000, "cpu": host, **more}, per_pass=False)


@pytest.mark.slow
def test_an_engine_has_whole_pages_in_ram_and_the_others_on_disk() -> None:
    budget = sum(long_profile().kv_cache) * 5 // 8
    made = of_engine(budget)
    there = sum(
        nbytes for nbytes, part in zip(long_profile().kv_cache, units(), strict=True) if part in made.kv_on_host
    )
    page = there * KV_PAGE // long_profile().workload.context_length
    held = made.devices["cpu"]
    assert held.kv_cache == made.kv_in_ram // KV_PAGE * page < there
    assert made.kv_on_disk == made.devices["disk"].kv_cache == there - held.kv_cache + KV_SPARE_PAGES * page
    assert held.total <= budget
    assert made.devices[0].total <= 6_000_000
    assert Plan.from_json(made.to_json()) == made


def units() -> list[str]:
    return [unit.name for unit in long_profile().units]


@pytest.mark.slow
def test_ram_that_holds_enough_layers_but_not_all_needs_no_disk() -> None:
    whole = sum(long_profile().kv_cache)
    made = plan(long_profile(), {0: 9_000_000, "cpu": whole * 9 // 10}, per_pass=False)
    assert 0 < made.devices["cpu"].kv_cache < whole
    assert not made.kv_on_disk


@pytest.mark.slow
def test_an_engine_has_in_ram_what_a_step_writes_to() -> None:
    with pytest.raises(BudgetError):
        of_engine(sum(long_profile().kv_cache) // 4)  # less than pages of a step, and those that are written ahead


@pytest.mark.slow
def test_an_engines_pages_in_ram_are_no_more_than_they_are() -> None:
    found = of_engine(10**9)
    assert found.devices["cpu"].kv_cache == len(found.kv_on_host) * max(long_profile().kv_cache)


@pytest.mark.slow
def test_as_many_sequences_are_admitted_as_ram_and_the_disk_hold_together() -> None:
    whole = sum(long_profile().kv_cache)
    found = of_engine(whole * 5 // 8, disk=3 * whole)
    free = replace(found.devices[0], budget=100 * found.devices[0].total)
    roomy = replace(found, devices={**found.devices, 0: free})
    in_ram, there = roomy.devices["cpu"].free, roomy.devices["disk"].free
    assert in_ram is not None
    assert there is not None
    each = roomy.devices["cpu"].kv_cache + roomy.devices["disk"].kv_cache
    assert roomy.max_sequences() == 1 + (in_ram + there) // each
    unlimited = replace(roomy, devices={**roomy.devices, "disk": replace(roomy.devices["disk"], budget=None)})
    assert unlimited.max_sequences() == roomy.kv_in_ram // KV_PAGE // 2


@pytest.mark.slow
def test_reading_keys_and_values_is_counted_in_the_time_of_a_step() -> None:
    budgets: dict[int | str, int] = {0: 4_000_000, "cpu": sum(long_profile().kv_cache) // 4}
    slow = replace(machine(link=1e12, host=1e-7), disk_warm=1e6, disk_cold=1e6)
    made = plan(long_profile(), budgets, machine=slow)
    assert made.prediction is not None
    assert made.prediction.token >= made.kv_on_disk / 1e6
    assert made.prediction.binds == "reading from disk"


@pytest.mark.slow
def test_keys_and_values_of_an_engines_draft_stay_on_its_device() -> None:
    budgets: dict[int | str, int] = {0: 4_000_000, "cpu": 10**9}
    assert plan(long_profile(), budgets, per_pass=False).kv_on_host
    assert not plan(long_profile(), budgets, per_pass=False, draft_tokens=1).kv_on_host
