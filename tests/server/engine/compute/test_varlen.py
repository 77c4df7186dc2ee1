"""One attention call for a whole step: the bits of the loop, wherever a kernel keeps them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from bigmodel.devices import memory_allocated, virtual
from bigmodel.server.engine import EngineOptions, build_engine
from bigmodel.server.engine.compute import varlen
from bigmodel.server.engine.compute.attention import attend
from bigmodel.server.engine.compute.varlen import batched_kernel
from bigmodel.server.engine.core import EngineCore
from tests.examples import alike
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("accelerators")


class LoopKernel:
    """A kernel made of the loop's attention: what a device's kernel must compute."""

    def __init__(self, error: float = 0.0) -> None:
        self.calls = 0
        self.error = error

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        longest: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        self.calls += 1
        out = torch.empty_like(query)
        rows, positions = queries.tolist(), keys.tolist()
        assert max(b - a for a, b in pairwise(positions)) == longest
        for (q0, q1), (k0, k1) in zip(pairwise(rows), pairwise(positions), strict=True):
            q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
            out[q0:q1] = attend(q, k, v, offset=(k1 - k0) - (q1 - q0), scale=scale, window=window)
        return out + self.error * len(rows)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopKernel]:
    made = LoopKernel()
    monkeypatch.setitem(varlen.KERNELS, "virtual", (made,))
    yield made
    varlen.is_checked.cache_clear()


def core(device: str, **changes: Any) -> EngineCore:
    options = EngineOptions(kv_bytes=16 << 20, max_sequences=4)
    return build_engine(tiny_model(**changes).to(device), tiny_tokenizer(), options=options).core


def tokens(core: EngineCore) -> list[list[int]]:
    """The tokens of requests that share a beginning, are long, or begin later."""
    prompts = ["the cat " * 20, "the cat " * 20 + "in", "then", "in the"]
    requests = [make_request(prompt, max_tokens=3, temperature=0, ignore_eos=True) for prompt in prompts]
    for request in requests[:2]:
        core.add(request)
    core.step()
    for request in requests[2:]:
        core.add(request)
    while not core.idle:
        core.step()
    assert all(isinstance(request.sink, Collector) for request in requests)
    return [request.sink.tokens() for request in requests]  # type: ignore[attr-defined]


@pytest.mark.slow
@alike("changes", [{"num_key_value_heads": 4}, {}], first=1, ids=["all heads", "grouped"])
def test_a_step_makes_one_attention_call_in_each_layer(kernel: LoopKernel, changes: dict[str, Any]) -> None:
    batched = core("virtual:0", **changes)
    assert tokens(batched) == tokens(core("cpu", **changes))
    layers, checks = 2, 1 + len(varlen.CHECKED_SHAPES)
    assert kernel.calls == layers * batched.steps + checks


@pytest.mark.slow
@pytest.mark.parametrize(("most", "parts"), [(10, [(0, 3), (3, 4), (4, 6)]), (100, [(0, 6)]), (1, [(0, 1)])])
def test_calls_are_gathered_together_as_far_as_there_is_room(most: int, parts: list[tuple[int, int]]) -> None:
    lengths = [3, 4, 3, 20, 5, 5] if most > 1 else [7]
    assert varlen.parts_of_lengths(lengths, most) == [slice(*part) for part in parts]


@pytest.mark.slow
def test_without_a_kernel_the_loop_goes_over_the_pages() -> None:
    assert tokens(core("virtual:0")) == tokens(core("cpu"))


@pytest.mark.slow
def test_a_step_sends_nothing_to_the_device_that_holds_the_host(kernel: LoopKernel) -> None:
    engine = core("virtual:0")
    engine.add(make_request("the cat", max_tokens=4, temperature=0, ignore_eos=True))
    engine.step()
    before = virtual.host_waits()
    engine.step()
    # The stand-in for a kernel reads two tensors in each of two layers.
    assert virtual.host_waits().since(before) == (0, 1 + 4, 0)


@pytest.mark.slow
def test_keys_and_values_take_the_same_memory_however_sequences_grow() -> None:
    engine = core("virtual:0")
    taken = set()
    for words in (1, 40, 80):  # up to several pages, which the prefix cache keeps
        engine.add(make_request("the cat " * words, max_tokens=2, temperature=0, ignore_eos=True))
        while not engine.idle:
            engine.step()
        gc.collect()
        taken.add(memory_allocated("virtual:0"))
    assert len(taken) == 1


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="virtual:0")


def test_a_kernel_whose_bits_depend_on_the_batch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(varlen.KERNELS, "virtual", (LoopKernel(error=1e-6),))
    with caplog.at_level(logging.WARNING):
        assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 8), attend) is None
    assert "its bits differ" in caplog.text


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(varlen.KERNELS, "virtual", (lambda query, *others: query,))
    assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 8), attend) is None


def test_a_kernel_that_refuses_a_device_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*arguments: object) -> torch.Tensor:
        raise RuntimeError("needs a newer card")

    monkeypatch.setitem(varlen.KERNELS, "virtual", (refusing,))
    with caplog.at_level(logging.WARNING):
        assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 8), attend) is None
    assert "needs a newer card" in caplog.text


def test_the_next_kernel_is_tried(monkeypatch: pytest.MonkeyPatch, kernel: LoopKernel) -> None:
    monkeypatch.setitem(varlen.KERNELS, "virtual", (LoopKernel(error=1e-6), kernel))
    assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 8), attend) is kernel


def test_values_of_another_width_and_the_host_are_left_to_the_loop(kernel: LoopKernel) -> None:
    assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 6), attend) is None
    host = torch.zeros(3, 4, 8)
    assert batched_kernel(host, host, host, attend) is None
    assert batched_kernel(rows(3, 4, 8), rows(3, 2, 8), rows(3, 2, 8), attend) is kernel


@pytest.mark.slow
def test_pytorch_has_the_function_that_is_called_on_cuda() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert callable(varlen_attn)
