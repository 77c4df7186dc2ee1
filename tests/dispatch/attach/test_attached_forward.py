"""What stands in for a module's forward: inputs brought, outputs sent back, and the module's own forward kept.

torch.compile of a dispatched model: the same numbers, and at most one graph break for each streamed block.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

from bigmodel.dispatch import dispatch_model, from_pretrained
from bigmodel.dispatch.attach.attached_forward import AttachedForward, RefuseConversion
from bigmodel.errors import DispatchError

from ..models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = torch.device("virtual:0")


class Scale(nn.Module):
    """Says where it was called, and multiplies."""

    def forward(self, x: torch.Tensor, *, by: torch.Tensor | None = None, keep: object = None) -> torch.Tensor:
        """Multiply."""
        self.seen = str(x.device)
        self.kept = keep
        return 2 * x if by is None else x * by


def attached(module: nn.Module, device: torch.device | None = DEVICE) -> AttachedForward:
    forward = AttachedForward(module, device, ("keep",))
    forward.attach()
    return forward


def test_inputs_come_to_the_device_by_position_and_by_name() -> None:
    module = Scale()
    attached(module)
    output = module(torch.ones(2), by=torch.full((2,), 3.0))
    assert module.seen == str(output.device) == "virtual:0"
    assert output.cpu().tolist() == [3, 3]


def test_what_is_to_be_skipped_stays_where_it_is() -> None:
    module, kept = Scale(), torch.ones(2)
    attached(module)
    module(torch.ones(2), keep=kept)
    assert module.kept is kept


def test_the_output_goes_back_to_the_input_or_to_a_device() -> None:
    module = Scale()
    forward = attached(module)
    forward.returns_to_input = True
    assert module(torch.ones(2)).device.type == "cpu"
    forward.returns_to_input, forward.output_device = False, torch.device("virtual:1")
    assert str(module(torch.ones(2)).device) == "virtual:1"


def test_without_a_device_nothing_is_moved() -> None:
    module, x = Scale(), torch.ones(2)
    attached(module, None)
    assert module(x).device.type == "cpu"


def test_it_looks_like_the_forward_it_stands_for() -> None:
    module = Scale()
    forward = attached(module)
    assert inspect.signature(module.forward) == inspect.signature(Scale().forward)
    assert forward.__doc__ == "Multiply."


def test_detaching_gives_the_module_its_own_forward_back() -> None:
    module = Scale()
    module.forward = own = lambda x: x + 1  # type: ignore[method-assign]
    forward = attached(module)
    assert module(torch.ones(1)).cpu().item() == 2
    forward.detach()
    assert module.forward is own
    plain = Scale()
    attached(plain).detach()
    assert "forward" not in plain.__dict__


def test_it_keeps_no_module_alive() -> None:
    module = Scale()
    forward = attached(module)
    del module
    forward.detach()


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", [AttachedForward(Scale(), None, None), RefuseConversion()])
def test_it_is_not_copied(attempt: object, thing: object) -> None:
    with pytest.raises(DispatchError, match="undispatch"):
        attempt(thing)  # type: ignore[operator]


TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def streamed(tmp_path: Path) -> LlamaForCausalLM:
    llama().save_pretrained(tmp_path)
    return from_pretrained(tmp_path, device_map={"": "cpu", "model.layers": "disk"})


@pytest.fixture
def streamed_to_accelerator(accelerators: None) -> LlamaForCausalLM:
    return dispatch_model(llama(), {"": 0, "model.layers": "cpu"})


def run(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def test_what_is_traced_gives_the_same_bits(streamed: LlamaForCausalLM) -> None:
    compiled = torch.compile(streamed, backend="eager")
    for _ in range(3):
        assert torch.equal(run(compiled), run(streamed))


def test_each_streamed_block_breaks_the_graph_at_most_once(streamed: LlamaForCausalLM) -> None:
    run(torch.compile(streamed, backend="eager"))
    assert 1 <= sum(counters["graph_break"].values()) <= len(streamed.model.layers)
    assert all("AttachedForward" in reason for reason in counters["graph_break"])
    assert counters["stats"]["calls_captured"] > 0


def test_what_is_streamed_to_an_accelerator_is_traced_with_the_same_bits(
    streamed_to_accelerator: LlamaForCausalLM,
) -> None:
    model = streamed_to_accelerator
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(run(compiled), run(model))
    assert 1 <= sum(counters["graph_break"].values()) <= len(model.model.layers)
    assert counters["stats"]["calls_captured"] > 0


def test_a_virtual_accelerator_says_which_backend_it_can_be_compiled_with(
    streamed_to_accelerator: LlamaForCausalLM,
) -> None:
    with pytest.raises(Exception, match="compile with backend='eager'"):
        run(torch.compile(streamed_to_accelerator, backend="aot_eager"))
    torch._dynamo.reset()
    run(streamed_to_accelerator)
    assert {parameter.device.type for parameter in streamed_to_accelerator.model.layers.parameters()} == {"cpu"}


@pytest.mark.slow
def test_compiled_code_gives_the_numbers_of_eager(streamed: LlamaForCausalLM) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler, with which torch.compile makes code for the CPU")
    torch.testing.assert_close(run(torch.compile(streamed, dynamic=False)), run(streamed))
