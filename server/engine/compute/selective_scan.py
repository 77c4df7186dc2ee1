"""Mamba's selective scan from a state: what modules of transformers call, with a state to begin with.

The mixers of Mamba, Falcon-Mamba, Jamba and Zamba call a function of their file, :data:`SCAN`, which begins each call
of several tokens with a state of zeros, so that the second part of a prompt would forget the first one. A mixer's
forward is therefore given another function of that name: a copy of the forward, with the same code and globals of its
own, so that nothing of transformers changes. The state is that of the cache that the forward is called with.

The recurrence is that of transformers, operation by operation. It is kept in one buffer of all positions, from which
the outputs of all of them are one product of matrices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

SCAN = "mamba_selective_scan"
"""Name under which forwards of transformers call their scan."""

TAKEN = {"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"}
"""Parameters of the scan that :func:`selective_scan` stands in for."""

IGNORED = {"use_mambapy", "use_associative_scan", "kwargs"}
"""Parameters that choose among ways to compute the same."""

_begun: ContextVar[Iterator[torch.Tensor] | None] = ContextVar("begun", default=None)


@contextmanager
def scans_begin_with(state: torch.Tensor | None) -> Iterator[None]:
    """Make scans of this thread begin with a state inside the context; with zeros where it is None.

    Args:
        state: State [sequences, width, state size] of a module that scans once a call, or [sequences, heads, width,
            state size] of one that scans each head by itself.
    """
    token = _begun.set(None if state is None else iter(state.unbind(1) if state.dim() == 4 else [state]))
    try:
        yield
    finally:
        _begun.reset(token)


def scanning_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The forward of ``module`` with scans that begin with states; None if it calls no scan that is known here."""
    made = _scanning(type(module).forward)
    return None if made is None else made.__get__(module)


@cache
def _scanning(forward: Callable[..., Any]) -> FunctionType | None:
    own = inspect.unwrap(forward)
    if not isinstance(own, FunctionType) or SCAN not in own.__code__.co_names:
        return None
    called = own.__globals__.get(SCAN)
    if called is None or not TAKEN <= inspect.signature(called).parameters.keys() <= TAKEN | IGNORED:
        return None
    names = {**own.__globals__, SCAN: _scan}
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _scan(*args: Any, return_last_state: bool = False, **kwargs: Any) -> Any:
    """What a forward calls: as transformers' function, from the state of :func:`scans_begin_with`."""
    begun = _begun.get()
    kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED}
    out, last = selective_scan(*args, **kwargs, state=None if begun is None else next(begun))
    return (out, last) if return_last_state else out


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective scan of Mamba over the tokens of sequences, from the state before them.

    Args:
        hidden_states: Inputs [sequences, width, tokens].
        dt: Time steps, likewise.
        A: Rates [width, state size].
        B: What inputs add to the state [sequences, state size, tokens].
        C: What outputs read of it, likewise.
        D: Factors [width] with which inputs are added to outputs.
        z: Gates of the outputs [sequences, width, tokens].
        delta_bias: Added to time steps [width].
        delta_softplus: Whether time steps then go through softplus.
        state: State [sequences, width, state size] before the first token; None: zeros.

    Returns:
        Outputs [sequences, width, tokens], and the state after the last token.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    states = _states(hidden_states, dt, A, B, state)
    last = states[-1].clone()
    read = C.permute(2, 0, 1)[..., None]
    out = torch.matmul(states.to(hidden_states.dtype), read)[..., 0].permute(1, 2, 0)
    del states  # of all tokens: many times what the outputs take
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * functional.silu(z)
    return out, last


def _states(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, state: torch.Tensor | None
) -> torch.Tensor:
    """The states [tokens, sequences, width, state size] after each token; arguments as `selective_scan` has them."""
    by_token = dt.permute(2, 0, 1)[..., None]
    factors = (A * by_token).exp_()
    states = by_token * B.permute(2, 0, 1)[:, :, None].float()
    states *= hidden_states.permute(2, 0, 1)[..., None].float()
    last = state
    for factor, now in zip(factors.unbind(), states.unbind(), strict=True):
        if last is not None:
            now += factor.mul_(last)
        last = now
    return states
