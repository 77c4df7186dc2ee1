"""Mamba's scan begins with a state; the slow twin is transformers' function, and its step of one token."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.server.engine.compute.selective_scan import (
    SCAN,
    scanning_forward,
    scans_begin_with,
    selective_scan,
)

modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
if not hasattr(modeling, SCAN):
    pytest.skip("Mamba of this transformers scans within its forward", allow_module_level=True)

TOKENS, WIDTH, SIZE = 9, 6, 4


def inputs(sequences: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    by_token = {name: torch.randn(sequences, WIDTH, TOKENS).to(dtype) for name in ("hidden_states", "dt", "z")}
    read = {name: torch.randn(sequences, SIZE, TOKENS).to(dtype) for name in "BC"}
    own = {"A": -torch.rand(WIDTH, SIZE), "D": torch.randn(WIDTH), "delta_bias": torch.randn(WIDTH)}
    return {**by_token, **read, **own, "delta_softplus": True}


def between(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The same for some of the tokens."""
    named = {"hidden_states", "dt", "z", "B", "C"}
    return {name: value[..., begin:end] if name in named else value for name, value in given.items()}


@pytest.mark.parametrize("left_out", [(), ("D", "z"), ("delta_bias", "delta_softplus")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_state_it_is_transformers_own(left_out: tuple[str, ...], dtype: torch.dtype) -> None:
    given = {name: value for name, value in inputs(dtype=dtype).items() if name not in left_out}
    out, last = selective_scan(**given)
    expected, state = modeling.mamba_selective_scan(**given, return_last_state=True)
    assert torch.equal(last, state)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("cut", [1, 4, TOKENS - 1])
def test_from_the_state_of_the_first_tokens_it_goes_on_as_if_never_cut(cut: int) -> None:
    given = inputs()
    whole, last = selective_scan(**given)
    first, state = selective_scan(**between(given, 0, cut))
    kept = state.clone()
    second, end = selective_scan(**between(given, cut, TOKENS), state=state)
    torch.testing.assert_close(end, last)
    assert torch.equal(state, kept)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole)


@pytest.mark.usefixtures("accelerators")
def test_outputs_are_computed_without_the_factors_of_the_states() -> None:
    given = {
        name: value.to("virtual:0") if isinstance(value, torch.Tensor) else value for name, value in inputs().items()
    }
    before = memory_allocated(0)
    reset_peak_memory(0)
    selective_scan(**given)
    of_a_token = 2 * WIDTH * 4
    assert max_memory_allocated(0) - before <= TOKENS * of_a_token * (2 * SIZE + 4)


def test_each_token_is_a_step_of_the_recurrence() -> None:
    given = inputs(1)
    state = torch.randn(1, WIDTH, SIZE)
    out, last = selective_scan(**given, state=state)
    time = functional.softplus(given["dt"] + given["delta_bias"][:, None])
    for token in range(TOKENS):
        x, dt, b, c = (each[0, :, token] for each in (given["hidden_states"], time, given["B"], given["C"]))
        state = torch.exp(given["A"] * dt[:, None]) * state + dt[:, None] * b * x[:, None]
        expected = (state[0] @ c + given["D"] * x) * functional.silu(given["z"][0, :, token])
        torch.testing.assert_close(out[0, :, token], expected)
    torch.testing.assert_close(last, state)


def mixer(config: Any) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    return next(module for module in model.modules() if type(module).__name__.endswith("MambaMixer"))


def test_a_forward_scans_from_the_state_inside_the_context_alone() -> None:
    module = mixer(transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=SIZE))
    forward = scanning_forward(module)
    assert forward is not None
    hidden = torch.randn(1, 5, 8)
    with torch.no_grad():
        plain, own = module(hidden), forward(hidden)
        with scans_begin_with(torch.ones(1, 16, SIZE)):
            begun = forward(hidden)
        with scans_begin_with(torch.zeros(1, 16, SIZE)):
            zeros = forward(hidden)
        after = forward(hidden)
    torch.testing.assert_close(own, plain)
    assert torch.equal(zeros, own)
    assert torch.equal(after, own)
    assert not torch.allclose(begun, own)


def test_heads_that_are_scanned_one_by_one_begin_with_their_own_states() -> None:
    config = transformers.ZambaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, layers_block_type=["mamba"], n_mamba_heads=2,
        mamba_d_state=SIZE, mamba_dt_rank=2, attention_hidden_size=16, num_attention_heads=2, intermediate_size=8,
    )  # fmt: skip
    module = mixer(config)
    forward = scanning_forward(module)
    assert forward is not None
    states = torch.randn(1, 2, 8, SIZE)
    hidden = torch.randn(1, 5, 8)
    with torch.no_grad(), scans_begin_with(states):
        both = forward(hidden)
    swapped = states.flip(1)
    with torch.no_grad(), scans_begin_with(swapped):
        other = forward(hidden)
    assert not torch.allclose(both, other)


def test_modules_without_a_scan_that_is_known_have_their_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scanning_forward(torch.nn.Linear(2, 2)) is None

    def other(hidden_states: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        return hidden_states

    class Module(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return mamba_selective_scan(hidden_states, hidden_states)  # type: ignore[name-defined,no-any-return]  # noqa: F821

    monkeypatch.setitem(Module.forward.__globals__, SCAN, other)
    assert inspect.unwrap(Module.forward).__code__.co_names[0] == SCAN
    assert scanning_forward(Module()) is None
