"""The layers of each node: consecutive ones, so many that the predicted seconds are least.

The search begins with layers in proportion to the accelerators' budgets, and moves layers from one node to another as
long as that is faster: many at once first, single ones at last. Fewer layers are not always faster step by step: a node
that streams nothing needs no buffers for that, either. So moves that leave a node just as many as it holds are tried,
too. How long a stage takes is asked of its plan. A stage of the same layers on an equal node is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, permutations

from ...errors import PlanError

Cut = tuple[int, ...]
"""How many layers each node has."""


def in_proportion(layers: int, weights: Sequence[float]) -> Cut:
    """Return how many of `layers` each node has, at least one, in proportion to `weights`.

    Raises:
        PlanError: there are fewer layers than nodes.
    """
    if layers < len(weights):
        raise PlanError(f"the model has {layers} layers, too few for {len(weights)} nodes: each has at least one")
    total = sum(weights) or 1.0
    bounds = [0]
    for at in range(1, len(weights)):
        wanted = round(layers * sum(weights[:at]) / total)
        bounds.append(min(max(wanted, bounds[-1] + 1), layers - (len(weights) - at)))
    bounds.append(layers)
    return tuple(stop - start for start, stop in pairwise(bounds))


def best_cut(begin: Cut, cost: Callable[[Cut], tuple[float, float]], held: Sequence[int] = ()) -> Cut:
    """Return the cut of least cost that moves of layers between two nodes reach.

    Args:
        begin: the cut that the search begins with.
        cost: what is minimised, by cut; smaller tuples are better.
        held: for each node, how many layers it holds without streaming any; empty: not known.
    """
    best, least = begin, cost(begin)
    width = max(max(begin) // 2, 1)
    while True:
        moved = False
        for source, target in permutations(range(len(begin)), 2):
            for other in _moves(best, source, target, width, held):
                if (found := cost(other)) < least:
                    best, least, moved = other, found, True
        if moved:
            continue
        if width == 1:
            return best
        width //= 2


def _moves(cut: Cut, source: int, target: int, width: int, held: Sequence[int]) -> Iterator[Cut]:
    """Yield cuts with layers of one node on another: `width`, and so many that one has just what it holds."""
    widths = {width: None}
    if held:
        widths |= {cut[source] - held[source]: None, held[target] - cut[target]: None}
    for count in widths:
        other = _moved(cut, source, target, count) if count > 0 else None
        if other is not None:
            yield other


def _moved(cut: Cut, source: int, target: int, width: int) -> Cut | None:
    """Return a cut with `width` layers of one node on another; None if it has too few."""
    if cut[source] <= width:
        return None
    counts = list(cut)
    counts[source] -= width
    counts[target] += width
    return tuple(counts)
