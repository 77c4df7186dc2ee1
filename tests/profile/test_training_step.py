from __future__ import annotations

import pytest
import torch
import transformers as t

from bigmodel.errors import PlanError
from bigmodel.profile.sharding import BACKWARD, FORWARD, OPTIMIZER, REDUCING
from bigmodel.profile.training_step import TrainingStep

CONFIG = t.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64)


def recorded(model: torch.nn.Module) -> TrainingStep:
    step = TrainingStep(model, 2, 16, "sgd", False, "cpu")
    step.record()
    return step


def test_gradients_are_all_there_when_the_optimizer_runs_and_none_in_the_forward() -> None:
    step = recorded(t.LlamaForCausalLM(CONFIG))
    none = {phase: step.most_beside(phase, lambda _: 0) for phase in (FORWARD, OPTIMIZER)}
    assert step.most_beside(FORWARD, int) == none[FORWARD]
    assert step.most_beside(OPTIMIZER, int) == none[OPTIMIZER] + step.gradients


def test_blocks_give_gradients_after_the_head_has() -> None:
    model = t.LlamaForCausalLM(CONFIG)
    step = recorded(model)
    beside = {
        phase: step.most_beside(phase, int) - step.most_beside(phase, lambda _: 0) for phase in (BACKWARD, REDUCING)
    }
    assert 0 <= beside[BACKWARD] <= model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    assert beside[REDUCING] > beside[BACKWARD]


def test_the_model_itself_is_left_alone() -> None:
    model = t.LlamaForCausalLM(CONFIG).eval()
    recorded(model)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_of_unknown_inputs_is_refused() -> None:
    model = t.LlamaForCausalLM(CONFIG)
    model.main_input_name = "voltages"
    with pytest.raises(PlanError, match="voltages"):
        recorded(model)
