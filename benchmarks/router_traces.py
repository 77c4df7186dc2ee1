"""Traces of routers' choices, with and without temporal locality, and a model whose routers follow one.

Random weights give routers no habits. Routers of trained mixtures have two: some experts are chosen more often than
others, and an expert chosen for one token is likely to be chosen for the next. In the middle layer of Mixtral 8x7B
about 27 % of first choices are those of the token before, where chance gives 12.5 % (arXiv:2401.04088). Here the
experts of a token are drawn one after another, without replacement: with probability `repeat` from those of the token
before, otherwise from all, where the n-th most popular expert of a layer has the weight ``n ** -skew``. `repeat` and
`skew` of 0 give uniform choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Habits:
    """The habits of routers.

    Attributes:
        repeat: Probability with which an expert is drawn from those of the token before.
        skew: Exponent of the popularity of experts; 0: all are equally popular.
    """

    repeat: float = 0.0
    skew: float = 0.0


CANDIDATES = 32
"""Traces of which a typical one is chosen."""

UNIFORM = Habits()
LOCAL = Habits(repeat=0.4, skew=0.6)

Trace = Sequence[Sequence[Sequence[int]]]
"""The experts of each token in each layer: ``trace[layer][token]``."""


def draw_trace(layers: int, experts: int, per_token: int, tokens: int, habits: Habits, seed: int = 0) -> Trace:
    """Return the choices of the routers of `layers` layers for `tokens` tokens, `per_token` distinct experts each.

    Raises:
        ValueError: A token cannot have so many distinct experts.
    """
    if not 0 < per_token <= experts:
        raise ValueError(f"{per_token} of {experts} experts cannot be chosen for each token")
    draw = random.Random(seed)
    return [_of_layer(draw, experts, per_token, tokens, habits) for _ in range(layers)]


def _of_layer(draw: random.Random, experts: int, per_token: int, tokens: int, habits: Habits) -> list[list[int]]:
    popularity = [(rank + 1) ** -habits.skew for rank in range(experts)]
    draw.shuffle(popularity)
    found: list[list[int]] = []
    for _ in range(tokens):
        chosen: list[int] = []
        while len(chosen) < per_token:
            again = [each for each in (found[-1] if found else []) if each not in chosen]
            if again and draw.random() < habits.repeat:
                chosen.append(draw.choice(again))
            else:
                left = [each for each in range(experts) if each not in chosen]
                chosen += draw.choices(left, [popularity[each] for each in left])
        found.append(sorted(chosen))
    return found


def typical_trace(draw: Callable[[int], Trace], slots: int, after: int, seed: int = 0) -> Trace:
    """Return, of `CANDIDATES` traces, the one whose hits are nearest to the mean of all.

    Few steps of any other may have a fifth more or fewer.

    Args:
        draw: Returns the trace of a seed.
        slots: Experts of a cache that all layers share, which evicts as that of a dispatched model does.
        after: Tokens that fill the cache, whose hits are not counted.
        seed: The traces are those of the `CANDIDATES` seeds that begin with ``CANDIDATES * seed``.
    """
    traces = [draw(CANDIDATES * seed + number) for number in range(CANDIDATES)]
    hits = [hits_of(trace, slots, after) for trace in traces]
    mean = sum(hits) / len(hits)
    return min(zip(traces, hits, strict=True), key=lambda each: abs(each[1] - mean))[0]


def hits_of(trace: Trace, slots: int, after: int = 0) -> int:
    """Return how many chosen experts are in such a cache, of the tokens behind the first `after` ones."""
    import numpy as np

    from bigmodel.dispatch.experts.policy import ExpertPolicy

    policy = ExpertPolicy(len(trace), 1 + max(expert for layer in trace for chosen in layer for expert in chosen))
    cache: set[tuple[int, int]] = set()
    hits = 0
    for token, choices in enumerate(zip(*trace, strict=True)):
        for layer, chosen in enumerate(choices):
            policy.visit(layer, chosen)
            wanted = {(layer, expert) for expert in chosen}
            hits += len(wanted & cache) if token >= after else 0
            others = sorted(cache - wanted)
            if others and len(wanted) + len(others) > slots:
                soonest = policy.waits(*np.array(others).T).argsort(kind="stable")
                others = [others[each] for each in soonest[: max(slots - len(wanted), 0)]]
            cache = {*wanted, *others}
    return hits


@contextmanager
def following(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Within this context the routers of `model` choose as `trace` has it, for one token after another.

    Each forward of one token takes the next token of the trace; after the last one it begins anew. Weights of the
    experts, and forwards of several tokens, stay the routers' own.
    """
    import torch

    def choose(number: int) -> Any:
        turn = 0

        def replaced(_module: Any, _inputs: Any, output: Any) -> Any:
            nonlocal turn
            *others, index = output
            if index.shape[0] != 1:
                return output
            index = torch.tensor([trace[number][turn % len(trace[number])]], dtype=index.dtype).to(index.device)
            turn += 1
            return (*others, index)

        return replaced

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [router.register_forward_hook(choose(number)) for number, router in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
