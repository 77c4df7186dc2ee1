"""Generation decides by the device that a dispatched model runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from bigmodel import dispatch_model, undispatch
from bigmodel.dispatch.attach.decoding import METHOD

pytestmark = pytest.mark.usefixtures("accelerators")


def mixture() -> Any:
    config = Qwen2MoeConfig(
        hidden_size=16, intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        vocab_size=32,
    )  # fmt: skip
    return Qwen2MoeForCausalLM._from_config(config, experts_implementation="grouped_mm").eval()


def when_decoding(model: Any) -> set[str]:
    """Return the experts functions within the context of steps."""
    with getattr(model, METHOD)():
        return set(model.get_experts_implementation().values())


@pytest.mark.parametrize(("where", "main"), [("cpu", "virtual:0"), ("cpu", None), (0, None)])
def test_steps_use_the_experts_function_of_the_resident_model_on_the_main_device(where: Any, main: Any) -> None:
    resident = mixture().to(main or ("virtual:0" if where == 0 else "cpu"))
    model = dispatch_model(mixture(), {"": where}, main_device=main)
    assert when_decoding(model) == when_decoding(resident)
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


def test_an_undispatched_model_decides_by_its_weights_again() -> None:
    model = undispatch(dispatch_model(mixture(), {"": "cpu"}, main_device="virtual:0"))
    assert METHOD not in vars(model)
    assert when_decoding(model) == {"grouped_mm"}


def test_a_model_that_does_not_generate_gets_no_such_method() -> None:
    model = dispatch_model(nn.Linear(2, 2), {"": "cpu"}, main_device="virtual:0")
    assert METHOD not in vars(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)
