"""Admission of calls: as many forwards of a model run at once as its budgets have room for; others wait their turn.

A plan counts the memory of one forward (`bigmodel.plan.result.forwards`). Where budgets were given, a call of the model
begins when those that run leave room for it, and calls begin in the order in which they came. A device computes one
kernel at a time anyway, so that waiting costs little.

Counted are, for each call, the planned activations, workspace, and keys and values, until it returns:

- A forward, or a call of a part of the model by itself, is as large as one planned. One that is known to be larger, or
  that is transformed (`TransformBudgets` measures these), runs alone.
- `generate` is one call from beginning to end, so that its keys and values are counted between its forwards, too.

Not counted is what belongs to the caller: inputs, what a call has returned, and so keys and values that a loop of the
caller's own keeps between forwards. Nor are the calls that record gradients, which wait for nothing (`plan_training`
plans these, one at a time), what a forward leaves to a generator that it returns, and the memory of other models on the
device: each keeps to its own plan.

A call within another one of the same thread, of the same model or of another, is never held: two threads could wait for
one another. A thread must not wait, in a call of the model, for another thread's call of it, as that one may be waiting
for this one to return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..weights.visits import Visited


class _Inside(threading.local):
    """Whether the calling thread is in a call that was admitted, of any model."""

    now = False


_inside = _Inside()


class _Turn:
    """A call that waits or runs, with the number of planned forwards that it counts as."""

    __slots__ = ("forwards",)

    def __init__(self, forwards: int) -> None:
        self.forwards = forwards


class Admission(Visited[int, _Turn]):
    """Admits calls of one model. A visit holds the turn of one call.

    Args:
        most: Planned forwards that budgets have room for at once; at least one.

    Attributes:
        inside: Whether the calling thread is in a call that was admitted, of any model, as `now`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = _inside
        self.start()

    def _start(self) -> None:
        super()._start()
        self._line: list[_Turn] = []
        self._running: list[_Turn] = []

    @property
    def waiting(self) -> int:
        """Number of calls of this process that wait."""
        return len(self._line) if self.is_started else 0

    def run(self, forwards: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `call` returns, called once there is room for it, or at once within a call of the same thread.

        Args:
            forwards: The number of planned forwards that it counts as: 1 to `most`.
            call: The call, within which the thread is inside.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            Exception: That of the call; it holds nothing then.
        """
        if self.inside.now:
            return call(*args, **kwargs)
        return self.visit(forwards, lambda _: self._call(call, args, kwargs))

    def _call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside.now = True
        try:
            return call(*args, **kwargs)
        finally:
            self.inside.now = False

    def _enter(self, request: int, held: list[_Turn]) -> None:
        turn = _Turn(request)
        held.append(turn)
        with self._lock:
            self._line.append(turn)
            while self._line[0] is not turn or not self._has_room(turn):
                self._changed.wait()
            self._running.append(turn)
            self._line.remove(turn)
            self._wake()

    def _has_room(self, turn: _Turn) -> bool:
        return turn.forwards + sum([each.forwards for each in self._running]) <= self.most

    def _leave(self, held: list[_Turn]) -> None:
        with self._lock:
            for turn in held:
                for turns in (self._running, self._line):
                    if turn in turns:
                        turns.remove(turn)
            del held[:]
            self._wake()

    def _wake(self) -> None:
        """Have the first of the line look again whether there is room."""
        if self._line:
            self._changed.notify_all()
