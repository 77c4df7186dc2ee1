from __future__ import annotations

import pytest
import transformers as t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import virtual
from bigmodel.errors import BudgetError, DeviceError, PlanError, SizeError
from bigmodel.plan import STRATEGIES, Plan, check_device_map, make_plan, owner_of
from bigmodel.profile import find_tied_parameters, named_tensors, profile_model

from ..profile.models import Flat, Stack, on_meta, tiny_llama
from .machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")


def measured_weights(model: nn.Module, plan: Plan) -> dict[object, int]:
    """Bytes of parameters on each device of the plan's map, tied ones once per device: the slow, obvious way."""
    found: dict[object, dict[int, int]] = {}
    for name, tensor, is_buffer, _ in named_tensors(model):
        if not is_buffer:
            device = plan.device_map[str(owner_of(name, plan.device_map))]
            found.setdefault(device, {})[id(tensor)] = tensor.nbytes
    return {device: sum(sizes.values()) for device, sizes in found.items()}


def assert_sound(model: nn.Module, plan: Plan, budgets: dict[int | str, int]) -> None:
    check_device_map(model, plan.device_map)
    for device, planned in plan.devices.items():
        assert planned.total <= budgets.get(device, planned.total)
    weights = {device: planned.weights for device, planned in plan.devices.items() if planned.weights}
    assert weights == measured_weights(model, plan)
    for names in find_tied_parameters(model):
        assert len({plan.device_map[str(owner_of(name, plan.device_map))] for name in names}) == 1


def test_a_model_that_fits_has_nothing_streamed() -> None:
    plan = make_plan(tiny_llama(), {0: "10MB", "cpu": "10MB"}, context_length=64)
    assert set(plan.device_map.values()) == {0}
    assert plan.streamed == ()
    assert plan.slots == 0


def test_the_map_is_in_the_order_the_parts_run() -> None:
    names = list(make_plan(tiny_llama(), {"cpu": "10MB"}, context_length=64).device_map)
    assert names[0] == "model.embed_tokens"
    assert names[-1] == "lm_head"
    assert names.index("model.rotary_emb") < names.index("model.layers.0")


def test_without_accelerators_all_runs_on_the_cpu_and_the_rest_is_viewed_on_disk() -> None:
    model = tiny_llama()
    plan = make_plan(model, {"cpu": "500kB"}, context_length=32)
    assert set(plan.execution.values()) == {"cpu"}
    assert set(plan.device_map.values()) == {"cpu", "disk"}
    assert_sound(model, plan, {"cpu": 500_000})


def test_streamed_blocks_have_two_slots_on_the_main_device() -> None:
    model = tiny_llama(num_hidden_layers=12, hidden_size=128, intermediate_size=512)
    plan = make_plan(model, {0: "4MB", "cpu": "100MB"}, context_length=16)
    assert plan.slots == 2
    assert len(plan.streamed) > 1
    assert plan.devices[0].slots == 2 * plan.slot_bytes
    assert plan.slot_bytes >= max(part.bytes for part in plan.streamed)
    assert_sound(model, plan, {0: 4_000_000, "cpu": 100_000_000})


def test_embeddings_that_are_not_resident_are_looked_up_where_they_lie() -> None:
    model = tiny_llama(vocab_size=20_000)
    plan = make_plan(model, {0: "8MB", "cpu": "100MB"}, context_length=16)
    assert (plan.device_map["model.embed_tokens"], plan.execution["model.embed_tokens"]) == ("cpu", "cpu")
    assert plan.device_map["lm_head"] == 0


def test_kv_cache_and_activations_count_against_the_device_that_runs_the_layer() -> None:
    model = tiny_llama(num_hidden_layers=8)
    profile = profile_model(model, batch_size=2, context_length=256, device_type="virtual")
    each = (profile.weights + sum(profile.kv_cache)) * 2 // 3 + profile.activations
    plan = make_plan(profile, {0: each, 1: each})
    assert sum(device.kv_cache for device in plan.devices.values()) == sum(profile.kv_cache)
    for device in (0, 1):
        layers = [name for name, at in plan.execution.items() if at == device and "layers" in name]
        assert plan.devices[device].kv_cache == len(layers) * max(profile.kv_cache)
        assert plan.devices[device].activations > 0
    assert_sound(model, plan, {0: each, 1: each})


def test_balanced_shares_and_low_zero_spares_the_first() -> None:
    model = tiny_llama(num_hidden_layers=8)
    even = make_plan(model, {0: "8MB", 1: "8MB"}, "balanced", context_length=16)
    low = make_plan(model, {0: "8MB", 1: "8MB"}, "balanced_low_0", context_length=16)
    ordered = make_plan(model, {0: "8MB", 1: "8MB"}, "sequential", context_length=16)
    assert abs(even.devices[0].weights - even.devices[1].weights) < 200_000
    assert low.devices[0].weights == 0
    assert ordered.devices[1].weights == 0


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_where_the_first_accelerator_is_too_small_for_any_block_another_runs_them(strategy: str) -> None:
    model = on_meta(Stack, width=64, depth=4)
    block = sum(p.nbytes for p in model.blocks[0].parameters())  # type: ignore[index]
    found = make_plan(model, {0: block - 1, 1: 3 * block, "cpu": 2**30}, strategy, context_length=0)
    assert found.main_device == 1
    assert {found.execution[f"blocks.{index}"] for index in range(4)} == {1}
    assert list(found.device_map.values()).count("cpu") > 0
    assert all(use.total <= use.budget for use in found.devices.values() if use.budget is not None)


def test_the_main_device_can_be_chosen() -> None:
    model = tiny_llama(num_hidden_layers=12)
    plan = make_plan(model, {0: "600kB", 1: "600kB", "cpu": "100MB"}, context_length=16, main_device="virtual:1")
    assert plan.main_device == 1
    assert {part.runs_on for part in plan.streamed} == {1}


def test_a_main_device_without_a_budget_is_refused() -> None:
    with pytest.raises(PlanError, match="main_device"):
        make_plan(Flat(), {0: 1000}, main_device=1)


def test_direct_tensors_of_a_split_module_are_on_the_main_device() -> None:
    model = on_meta(Stack, width=32, depth=8, direct=True)
    plan = make_plan(model, {0: 120_000, "cpu": 10**6})
    assert plan.device_map["scale"] == plan.device_map["offset"] == 0
    assert "cpu" in plan.device_map.values()
    assert_sound(model, plan, {0: 120_000, "cpu": 10**6})


def test_tied_embeddings_go_together() -> None:
    model = tiny_llama(tie_word_embeddings=True, vocab_size=4000)
    for budget in ("900kB", "3MB", "6MB"):
        plan = make_plan(model, {0: budget, "cpu": "100MB"}, context_length=16)
        assert plan.device_map["model.embed_tokens"] == plan.device_map["lm_head"]


def test_mixed_dense_and_expert_layers_and_their_slots() -> None:
    config = t.DeepseekV3Config(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=6, n_routed_experts=8,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8,
        v_head_dim=8, qk_nope_head_dim=8, n_group=2, topk_group=1, num_experts_per_tok=2, vocab_size=64,
        first_k_dense_replace=2,
    )  # fmt: skip
    model = on_meta(t.DeepseekV3ForCausalLM, config)
    plan = make_plan(model, {0: "900kB", "cpu": "100MB"}, context_length=16)
    assert plan.slot_bytes >= max(part.bytes for part in plan.streamed)
    assert_sound(model, plan, {0: 900_000, "cpu": 100_000_000})


def test_encoder_and_decoder_are_planned_together() -> None:
    config = t.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=4, num_heads=4, vocab_size=64)
    model = on_meta(t.T5ForConditionalGeneration, config)
    plan = make_plan(model, {0: "300kB", "cpu": "100MB"}, context_length=32, new_tokens=8)
    assert_sound(model, plan, {0: 300_000, "cpu": 100_000_000})
    assert plan.devices[0].kv_cache > 0


def test_a_budget_of_zero_is_a_device_that_is_not_there() -> None:
    plan = make_plan(tiny_llama(), {0: 0, 1: "10MB", "cpu": 0}, context_length=16)
    assert set(plan.device_map.values()) == {1}
    assert plan.main_device == 1


def test_a_plan_that_cannot_exist_names_budgets_that_do() -> None:
    model = tiny_llama()
    with pytest.raises(BudgetError) as caught:
        make_plan(model, {"cpu": "100kB", "disk": 0}, context_length=16)
    text = str(caught.value)
    enough = int(text.split("'cpu': ")[2].split("(")[1].split(" bytes")[0])
    assert make_plan(model, {"cpu": enough, "disk": 0}, context_length=16)
    with pytest.raises(BudgetError):
        make_plan(model, {"cpu": enough - 1, "disk": 0}, context_length=16)


@pytest.mark.parametrize("budgets", [{0: -1}, {0: "many"}, {"cpu": "10 GiBs"}])
def test_budgets_that_are_no_sizes_are_refused(budgets: dict[int | str, int | str]) -> None:
    with pytest.raises(SizeError):
        make_plan(Flat(), budgets)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(PlanError, match="fastest"):
        make_plan(Flat(), {0: 1000}, strategy="fastest")


def test_activations_that_are_not_known_are_said_to_be_so() -> None:
    class Choosy(Stack):
        def forward(self, ids):  # type: ignore[no-untyped-def]
            return ids[: int(ids.sum())]

    model = Choosy()
    model.config, model.main_input_name = t.LlamaConfig(), "input_ids"
    assert any("not known" in note for note in make_plan(model, {"cpu": 10**6}, context_length=8).notes)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(0, 700_000), min_size=0, max_size=2),
    st.integers(0, 700_000),
    st.booleans(),
    st.integers(0, 64),
)
def test_budgets_hold_and_bytes_are_exact_whatever_the_budgets(
    strategy: str, accelerators: list[int], host: int, tied: bool, context: int
) -> None:
    model = LLAMAS[tied]
    budgets: dict[int | str, int] = {**dict(enumerate(accelerators)), "cpu": host}
    try:
        plan = make_plan(model, budgets, strategy, context_length=context)
    except BudgetError:
        return
    assert_sound(model, plan, budgets)
    assert {part.name for part in plan.parts} == set(plan.device_map)


LLAMAS = {tied: tiny_llama(tie_word_embeddings=tied) for tied in (False, True)}


def test_a_profile_stands_in_for_its_model() -> None:
    model = tiny_llama()
    profile = profile_model(model, context_length=32, device_type="virtual")
    assert make_plan(profile, {0: "10MB"}) == make_plan(model, {0: "10MB"}, context_length=32)


def test_without_budgets_what_is_free_is_planned_with_less_headroom() -> None:
    virtual.configure(0, "10MB")
    virtual.configure(1, "10MB")
    plan = make_plan(tiny_llama(), context_length=32)
    assert plan.devices[0].budget == 9_000_000


def test_auto_goes_by_the_search_where_something_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigmodel.plan import plan, planner

    fast = machine(link=1.5e10)
    monkeypatch.setattr(planner, "known_machine", lambda: fast)
    model = tiny_llama(num_hidden_layers=16, hidden_size=128, intermediate_size=256)
    profile = profile_model(model, context_length=32, new_tokens=2, device_type="virtual")
    budgets = {0: profile.weights * 3 // 5 + profile.activations + sum(profile.kv_cache), "cpu": "1GB"}
    found = make_plan(profile, budgets)
    assert found.device_map == plan(profile, budgets, machine=fast).device_map
    assert found.device_map != plan(profile, budgets, machine=fast, objective="fit").device_map
    assert make_plan(profile, budgets, "sequential").device_map != found.device_map


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("strategy", ["auto"]),
        ("slots", 0),
        ("slots", float("nan")),
        ("offload_buffers", 2),
        ("offload_dtype", 4),
        ("new_tokens", 1.5),
        ("batch_size", 2**31),
        ("context_length", "16"),
        ("no_split_module_classes", {"Layer": 1}),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(argument: str, value: object) -> None:
    given = {"model": tiny_llama(), "max_memory": {"cpu": "1GB"}, "context_length": 16, argument: value}
    with pytest.raises(PlanError, match=argument):
        make_plan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "budgets", ["cpu=1GB", {"cpu": float("nan")}, {"cpu": 10**40}, {None: 1}, {"gpu": 1}, {True: 1}]
)
def test_budgets_of_no_device_or_no_size_are_refused(budgets: object) -> None:
    with pytest.raises((SizeError, DeviceError)):
        make_plan(Flat(), budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize("main_device", [True, 1.5, b"cpu", "gpu"])
def test_a_main_device_that_is_none_is_refused(main_device: object) -> None:
    with pytest.raises((PlanError, DeviceError)):
        make_plan(Flat(), {0: 1000, 1: 1000}, main_device=main_device)  # type: ignore[arg-type]


def test_where_nothing_is_streamed_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigmodel.plan import planner

    monkeypatch.setattr(planner, "known_machine", lambda: pytest.fail("the machine was asked"))
    assert make_plan(tiny_llama(), {0: "10MB", "cpu": "10MB"}, context_length=32).streamed == ()
    assert make_plan(Flat(), {"cpu": "10MB"}).streamed == ()


def test_only_where_it_is_allowed_does_the_host_compute_what_streams_too_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bigmodel.plan import planner

    monkeypatch.setattr(planner, "known_machine", lambda: machine(link=1e5))
    profile = profile_model(tiny_llama(num_hidden_layers=8), context_length=32, device_type="virtual")
    budgets = {0: profile.weights // 2 + profile.activations + sum(profile.kv_cache), "cpu": "1GB"}
    layers = {name for name in make_plan(profile, budgets).device_map if "layers" in name}
    for offload in ("stream", "auto"):
        runs_on = make_plan(profile, budgets, offload=offload).execution
        assert ("cpu" in {runs_on[name] for name in layers}) is (offload == "auto")
