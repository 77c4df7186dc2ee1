"""The ways through a forward whose conditions depend on values that are not known.

Each place in the code that reads such a condition gets the same answer every time, so a forward whose layers all read
it has two ways, not two for each layer. On the first way all conditions are true, on the second all are false. Each
further way changes the answer at one place of a way that was tried. A forward may have more ways than are tried
(`MOST_WAYS`); those tried take each branch once, unless it lies within several others.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

MOST_WAYS = 6
"""Ways that are tried: a forward runs as often."""

MOST_TURNS = 1000
"""Times that a place gets the same answer: a loop may run until it gets the other one."""

Place = tuple[CodeType, int] | None
"""Where code asks: the code and the instruction. None: within PyTorch."""


class Answers:
    """What unknown conditions are taken for, on one way through a forward.

    Args:
        otherwise: the answer at places that are not given.
        given: answers by place.

    Attributes:
        read: the answers that were asked for.
    """

    def __init__(self, otherwise: bool = True, given: Mapping[Place, bool] | None = None) -> None:
        self.read: dict[Place, bool] = {}
        self._otherwise = otherwise
        self._given = given or {}
        self._turns: Counter[Place] = Counter()

    def ask(self) -> bool:
        """Return the answer to the condition that the calling code reads."""
        place = _place()
        answer = self.read.setdefault(place, self.at(place))
        self._turns[place] += 1
        return answer if self._turns[place] <= MOST_TURNS else not answer

    @property
    def asked(self) -> int:
        """How often an answer was asked for."""
        return self._turns.total()

    def at(self, place: Place) -> bool:
        """Return the answer at a place."""
        return self._given.get(place, self._otherwise)

    def but(self, place: Place) -> Answers:
        """Return the answers of this way but for the one at `place`."""
        return Answers(self._otherwise, {**self.read, place: not self.read[place]})


def other_ways(first: Answers) -> Iterator[Answers]:
    """Yield answers for one way after the other, those of the next by what was asked for on those before.

    Args:
        first: the answers of the way that was tried first: all true.
    """
    tried = [first]
    waiting = deque([Answers(False), *map(first.but, first.read)])
    while waiting and len(tried) < MOST_WAYS:
        answers = waiting.popleft()
        if not any(all(answers.at(place) == answer for place, answer in each.read.items()) for each in tried):
            yield answers
            tried.append(answers)
            waiting += map(answers.but, answers.read)


def _place() -> Place:
    """Return the innermost place outside PyTorch and this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "bigmodel"):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None
