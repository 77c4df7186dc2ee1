"""torch.compile of a dispatched model: the same numbers, and at most one graph break for each streamed block."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

from bigmodel.dispatch import dispatch_model, from_pretrained

from ...accelerators import at
from ..models import ids, llama, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")

TOKENS = torch.arange(12).view(2, 6)
QUICK = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
"""Options of torch.compile that save looking for the CPU's vector instructions, and work for later compilations."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def streamed(tmp_path: Path) -> LlamaForCausalLM:
    llama(layers=2).save_pretrained(tmp_path)
    return from_pretrained(tmp_path, device_map={"": "cpu", "model.layers": "disk"})


@pytest.fixture
def streamed_to_accelerator(every_accelerator: str) -> LlamaForCausalLM:
    return dispatch_model(llama(layers=2), {"": 0, "model.layers": "cpu"})


def run(model: torch.nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def most_breaks(model: LlamaForCausalLM) -> int:
    """One for each streamed block; older versions of PyTorch count one more."""
    return len(model.model.layers) + (Version(torch.__version__).release < (2, 13))


@pytest.mark.long
@pytest.mark.slow
def test_traced_code_gives_the_same_bits_and_breaks_at_most_once_for_each_streamed_block(
    streamed: LlamaForCausalLM,
) -> None:
    compiled = torch.compile(streamed, backend="eager")
    for _ in range(2):
        assert torch.equal(run(compiled), run(streamed))
    assert 1 <= sum(counters["graph_break"].values()) <= most_breaks(streamed)
    assert all("AttachedForward" in reason for reason in counters["graph_break"])
    assert counters["stats"]["calls_captured"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_blocks_streamed_to_an_accelerator_are_traced_with_the_same_bits(
    streamed_to_accelerator: LlamaForCausalLM,
) -> None:
    model = streamed_to_accelerator
    compiled = torch.compile(model, backend="eager")
    # Transformers calls another kernel of attention while it is traced.
    resident = torch.compile(llama(layers=2).to(at(0)), backend="eager")
    expected = run(resident, TOKENS.to(at(0))).cpu()
    assert not counters["graph_break"]
    for _ in range(2):
        assert torch.equal(run(compiled), expected)
    assert 1 <= sum(counters["graph_break"].values()) <= most_breaks(model)
    assert counters["stats"]["calls_captured"] > 0


@pytest.mark.virtual_only("what it cannot be compiled with")
@pytest.mark.long
@pytest.mark.slow
def test_a_virtual_accelerator_says_which_backend_it_can_be_compiled_with(
    streamed_to_accelerator: LlamaForCausalLM,
) -> None:
    with pytest.raises(Exception, match="compile with backend='eager'"):
        run(torch.compile(streamed_to_accelerator, backend="aot_eager"))
    torch._dynamo.reset()
    run(streamed_to_accelerator)
    assert {parameter.device.type for parameter in streamed_to_accelerator.model.layers.parameters()} == {"cpu"}


@pytest.mark.long
@pytest.mark.slow
def test_compiled_code_gives_the_numbers_of_eager(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler, with which torch.compile makes code for the CPU")
    model = dispatch_model(stack(depth=1), {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path)
    with torch.no_grad(), torch._inductor.config.patch(QUICK):
        compiled = torch.compile(model, dynamic=False)(ids())
        torch.testing.assert_close(compiled, model(ids()))
    assert counters["inductor"]
