from __future__ import annotations

import pytest
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.profile import profile_model
from bigmodel.profile.model.experts import RouterChoice, distinct_experts, expert_names

from ..models import tiny_llama

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SIZES))


def test_the_expected_experts_grow_from_one_tokens_choice_to_all() -> None:
    assert distinct_experts(8, tokens=1, per_token=2) == pytest.approx(2)
    assert distinct_experts(8, tokens=2, per_token=2) == pytest.approx(2 + 2 * 6 / 8)
    assert distinct_experts(8, tokens=1000, per_token=2) == pytest.approx(8)
    assert RouterChoice(3, 8, 8).wanted == 8


def test_fused_experts_of_transformers_can_be_fetched_one_by_one_and_other_modules_have_none() -> None:
    model = mixtral()
    assert expert_names(model.model.layers[0].mlp.experts) == ["gate_up_proj", "down_proj"]
    assert expert_names(nn.Linear(2, 2)) == []


def test_a_unit_has_experts_and_bytes_without_them() -> None:
    profile = profile_model(mixtral(), context_length=0)
    (layer, *_) = (unit for unit in profile.units if unit.is_block)
    (experts,) = layer.experts
    one = 3 * 32 * 48 * 4
    assert (experts.count, experts.nbytes) == (8, one)
    assert layer.expert_weights == 8 * one
    assert layer.slot_bytes() - layer.slot_bytes_without_experts() == 8 * one
    assert all(unit.experts == () for unit in profile_model(tiny_llama(), context_length=0).units)


@pytest.mark.slow
def test_a_dry_run_records_router_choices() -> None:
    profile = profile_model(mixtral(), batch_size=2, context_length=9, new_tokens=1)
    prompt, step = (phase.trace.choices() for phase in profile.phases)
    blocks = [index for index, unit in enumerate(profile.units) if unit.is_block]
    assert prompt == {block: {0: RouterChoice(16, 2, 8)} for block in blocks}
    assert step == {block: {0: RouterChoice(2, 2, 8)} for block in blocks}
