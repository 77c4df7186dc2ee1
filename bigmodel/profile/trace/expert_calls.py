"""Upper bound of the bytes that one call of cached experts takes, for any choice of the router.

A routing of T tokens to k of E experts each makes A = T k rows, and touches between k and D = min(E, A) distinct
experts. With a cache of s experts, dispatch computes them

- all at once, if the routing touches at most s, which needs k <= s. All A rows are then computed together;
- in chunks of c = max(1, s / 2) experts otherwise, while the other half of the slots is filled. A token has at most
  min(c, k) rows in a chunk, as its experts differ. Of the d > s experts touched, the d - c outside the chunk have a row
  each, so that it has at most A - (d - c) rows: most for the smallest d, max(s + 1, k). So no chunk has more than
  min(T min(c, k), A - (d - c)) rows.

Every tensor of the experts function grows with its rows, tokens or experts, so the larger of the two peaks bounds every
routing. The bound is reached by a routing whose second chunk has all rows but those that the experts of the other
chunks must have, one row each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from ...limits import MOST_GROUPS, WAVES
from .events import Allocate, Event, Free, Route, Scratch

BY_ROWS = frozenset({"grouped_mm", "batched_mm"})
"""Experts functions whose product of a token with an expert does not depend on which experts are computed beside it."""

NUMBER = 8
"""Bytes of one expert index (int64), and of the row counts of one expert (two int32)."""


@dataclass(frozen=True)
class ExpertCall:
    """One way in which cached experts are called.

    Attributes:
        rows: rows, one for each token and chosen expert, in one call of the experts function.
        per_token: experts per token in that call.
        experts: experts among which the function tells the rows apart.
        beside: bytes of each tensor that is alive while the function runs.
        after: bytes of each tensor that is alive once it has run.
        gathers: whether the first use of a fused tensor copies the parts of all rows' experts in all fused tensors.
        views: whether these parts are viewed where the recorded function copied them.
    """

    rows: int
    per_token: int
    experts: int
    beside: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    gathers: bool = False
    views: bool = False

    def peak(self, route: Route, events: Iterable[Event], rounding: Callable[[int], int]) -> int:
        """Return the peak bytes beyond those before the call.

        Args:
            route: the call as it was recorded, with all experts in one tensor.
            events: the recorded events of the experts function.
            rounding: bytes that the allocator takes for a number of bytes.
        """
        return max(accumulate(self.changes(route, events, rounding)), default=0)

    def changes(self, route: Route, events: Iterable[Event], rounding: Callable[[int], int]) -> Iterator[int]:
        """Yield the bytes that are taken and given back (negative), in order, as many of these as of those; the
        arguments are those of `peak`."""
        copies = [route.choice.rows * nbytes for nbytes in route.expert_tensors] if self.gathers or self.views else []
        largest, began = max(copies, default=0), False
        beside = [rounding(nbytes) for nbytes in self.beside]
        yield from beside
        alive: dict[int, int] = {}
        ahead: list[int] = []  # copies that are alive before their allocation was recorded
        for event in events:
            if isinstance(event, Allocate):
                # The function copies the largest one first. The rows' tokens, before it, may be as large as another
                # copy, and so may results after it.
                if event.nbytes not in copies or not (began or event.nbytes == largest):
                    alive[event.storage] = rounding(self.bytes_of(event.nbytes, route))
                    yield alive[event.storage]
                    continue
                if not began and not self.views:
                    ahead = [*map(rounding, copies)]
                    yield from ahead
                began = True
                copies.remove(event.nbytes)
                if not self.views:
                    alive[event.storage] = rounding(event.nbytes)
                    ahead.remove(alive[event.storage])
            elif isinstance(event, Free) and event.storage in alive:
                yield -alive.pop(event.storage)
            elif isinstance(event, Scratch):
                yield rounding(event.nbytes)
                yield -rounding(event.nbytes)
        yield from (-nbytes for nbytes in (*alive.values(), *ahead, *beside))
        after = [rounding(nbytes) for nbytes in self.after]
        yield from after
        yield from (-nbytes for nbytes in after)

    def bytes_of(self, nbytes: int, route: Route) -> int:
        """Return the bytes of a tensor that was recorded with `nbytes`: its size grows with rows, tokens or experts. If
        several of these are possible, the maximum."""
        choice = route.choice
        tokens = self.rows // self.per_token
        possible = []
        if nbytes == route.nbytes:
            possible.append(nbytes // max(choice.tokens, 1) * tokens)
        if choice.rows and nbytes % choice.rows == 0:
            possible.append(nbytes // choice.rows * self.rows)
        if nbytes % choice.count == 0 and nbytes <= NUMBER * choice.count:
            possible.append(nbytes // choice.count * self.experts)
        return max(possible, default=nbytes)


def expert_calls(route: Route, slots: int) -> list[ExpertCall]:
    """Return the ways in which experts may be called with `slots` slots, each with its maximal sizes."""
    choice = route.choice
    if route.implementation in (None, "eager"):
        return [ExpertCall(choice.rows, choice.per_token, choice.count)]
    calls = []
    if choice.per_token <= slots:
        at_once = ExpertCall(choice.rows, choice.per_token, slots, beside=(NUMBER * choice.rows,))
        calls.append(at_once if slots <= MOST_GROUPS else _chunk(route, slots, choice.rows))
    if choice.most > slots:
        gathering = ExpertCall(choice.rows, choice.per_token, choice.count, gathers=True)
        calls.append(
            gathering if route.implementation == "batched_mm" else _chunk(route, slots, chunk_rows(route, slots))
        )
    return calls


def split_call(route: Route, slots: int) -> ExpertCall:
    """Return the call of those experts of which the host computes others meanwhile: products of these arrive beside it,
    and the numbers of their rows."""
    call = _chunk(route, slots, route.choice.rows)
    token_bytes = route.nbytes // max(route.choice.tokens, 1)
    return replace(call, beside=(*call.beside, route.choice.rows * token_bytes, route.choice.rows * NUMBER))


def host_call(route: Route) -> ExpertCall:
    """Return the call on the host of those of a call's experts that are computed where they lie, at most all of them.
    Beside it are the tokens, those of its rows and their numbers, and its products."""
    call = _chunk(route, route.choice.count, route.choice.rows)
    return replace(call, beside=(route.nbytes, *call.beside), after=(), views=True)


def chunk_rows(route: Route, slots: int) -> int:
    """Return the maximum of rows in one chunk of a routing that touches more experts than there are `slots`."""
    choice = route.choice
    size = max(1, slots // WAVES)
    touched = max(slots + 1, choice.per_token)
    return min(choice.tokens * min(size, choice.per_token), choice.rows - (touched - size))


def _chunk(route: Route, slots: int, rows: int) -> ExpertCall:
    """Return the call for a chunk of `rows` rows, each of one expert. Beside it are the products of all rows so far;
    its own rows' numbers, tokens, weights of one, and slots. Afterwards the products are weighted and added up."""
    choice, token_bytes = route.choice, route.nbytes // max(route.choice.tokens, 1)
    products = choice.rows * token_bytes
    own = (rows * token_bytes, rows * route.itemsize, rows * NUMBER, rows * NUMBER)
    wider = max(route.weight_itemsize, route.itemsize) // route.itemsize
    added = (route.nbytes * wider, route.nbytes) if wider > 1 else (route.nbytes,)
    after = (products, products * wider, *added)
    return ExpertCall(rows, 1, min(slots, MOST_GROUPS), (products, *own), after)
