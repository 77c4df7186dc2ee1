"""What the engine tells whoever counts: the metrics of the server, or nobody."""

from __future__ import annotations

from bigmodel.server.engine.request import Request


class Observer:
    """Is told what the engine does, and counts nothing. Subclasses count.

    Called from the engine's thread, so it must be quick. Times are in seconds.
    """

    def started(self, request: Request, waited: float) -> None:
        """A request is computed for the first time, `waited` after it arrived."""

    def tokens(self, prompt: int, generated: int) -> None:
        """So many tokens of prompts were computed, and so many generated, since the last call."""

    def first_token(self, seconds: float) -> None:
        """The first token of a request is there, `seconds` after it arrived."""

    def next_token(self, seconds: float) -> None:
        """A choice has another token, `seconds` after the one before."""

    def finished(self, request: Request, outcome: str, seconds: float) -> None:
        """A request has ended, `seconds` after it arrived. `outcome`: "ok", or why there is no answer."""

    def step(self, seconds: float, sequences: int) -> None:
        """A forward of `sequences` took so long."""
