"""What the engine tells whoever counts: the metrics of the server, or nobody."""

from __future__ import annotations

from typing import Protocol

from server.engine.request import Request


class Observer(Protocol):
    """Called from the engine's thread; must be quick. Times are in seconds."""

    def started(self, request: Request, waited: float) -> None: ...

    def tokens(self, prompt: int, generated: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def finished(self, request: Request, outcome: str, seconds: float) -> None: ...

    def step(self, seconds: float, sequences: int) -> None: ...


class Silent(Observer):
    """Counts nothing: what the protocol itself does with what it is told."""
