"""Gradients through offloaded experts are those of the resident model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bigmodel.devices import memory_allocated
from bigmodel.dispatch import dispatch_model

from ...accelerators import at
from ...examples import some
from ..mixtures import EXPERT_BYTES, deepseek_v3, experts_of, mixtral, qwen2_moe, qwen3_moe, tokens

IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]

pytestmark = pytest.mark.usefixtures("every_accelerator")


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    labels = tokens().to(at(0))
    model(labels, labels=labels).loss.backward()
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


def assert_same(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], exact: bool = True
) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(other, gradient, **tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "implementation"),
    [
        (qwen2_moe, "grouped_mm"),
        pytest.param(qwen3_moe, "batched_mm", marks=pytest.mark.long),
        pytest.param(deepseek_v3, "eager", marks=pytest.mark.long),
        *((mixtral, implementation) for implementation in some(IMPLEMENTATIONS, first=0)),
    ],
)
def test_gradients_are_those_of_the_resident_model(build: Callable[[], nn.Module], implementation: str) -> None:
    resident, streamed = build().train(), build().train()
    for model in (resident, streamed):
        model.set_experts_implementation(implementation)
    expected = gradients(resident.to(at(0)))
    # A class's own function uses the hidden states once for each expert. Their gradients are added up here before
    # those of other uses, a shared expert's for one, and there in between, which rounds differently.
    exact = implementation != "eager" or build is mixtral
    assert_same(gradients(dispatch_model(streamed, {"": "cpu"}, main_device=at(0))), expected, exact)


@pytest.mark.slow
def test_gradients_are_computed_in_the_precision_of_the_forward() -> None:
    resident = mixtral().train().to(at(0))
    streamed = dispatch_model(mixtral().train(), {"": "cpu"}, main_device=at(0))
    labels = tokens().to(at(0))
    found = []
    for model in (resident, streamed):
        with torch.autocast(torch.device(at(0)).type, dtype=torch.bfloat16):
            loss = model(labels, labels=labels).loss
        loss.backward()
        found.append({name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()})
    assert_same(found[1], found[0])


@pytest.mark.slow
def test_frozen_experts_get_none_and_what_lies_before_them_gets_its_own() -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model.train()

    expected = gradients(freeze(mixtral()).to(at(0)))
    model = dispatch_model(freeze(mixtral()), {"": "cpu"}, main_device=at(0))
    assert_same(gradients(model), expected)
    assert experts_of(model, 0).down_proj.grad is None


@pytest.mark.slow
def test_experts_leave_the_device_between_forward_and_backward() -> None:
    model = dispatch_model(mixtral().train(), {"": "cpu"}, main_device=at(0), expert_cache=EXPERT_BYTES)
    held = memory_allocated(0)
    loss = model(tokens(), labels=tokens()).loss
    assert memory_allocated(0) - held < EXPERT_BYTES
    loss.backward()
