"""Virtual tensors under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from bigmodel.devices import memory_allocated

pytestmark = pytest.mark.usefixtures("accelerators")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ weight + torch.arange(4, device=x.device), -1)


@pytest.mark.slow
def test_a_function_is_traced_whole_and_gives_the_same_bits() -> None:
    x, weight = torch.randn(3, 4, device="virtual:0"), torch.randn(4, 4, device="virtual:0")
    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    for _ in range(2):
        found = compiled(x, weight)
        assert str(found.device) == "virtual:0"
        assert torch.equal(found.cpu(), compute(x, weight).cpu())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_tracing_takes_no_memory_of_the_device() -> None:
    x = torch.randn(64, 64, device="virtual:0")
    held = memory_allocated(0)
    found = torch.compile(lambda x: x * 2, backend="eager")(x)
    assert memory_allocated(0) == held + found.nbytes


@pytest.mark.slow
def test_code_generating_backends_are_refused_with_what_to_do() -> None:
    x, weight = torch.randn(3, 4, device="virtual:0"), torch.randn(4, 4, device="virtual:0")
    with pytest.raises(Exception, match="compile with backend='eager'"):
        torch.compile(compute, backend="aot_eager")(x, weight)
    assert torch.equal(compute(x, weight).cpu(), compute(x, weight).cpu())
