"""Steps in flight: how many there are, and what is kept of each until it has landed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bigmodel.dispatch.transfer.stages import StagePipeline, StageStep
from bigmodel.server.engine.sampling.sampler import Arriving
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens


@dataclass(frozen=True)
class InFlight:
    """Several steps of an engine in flight through the stages of its model.

    Attributes:
        pipeline: the stages.
        most: steps in flight at most.
        worthwhile: how many are worth it, for a number of tokens that wait to be computed.
    """

    pipeline: StagePipeline
    most: int
    worthwhile: Callable[[int], int]

    def steps(self, tokens: int) -> int:
        """Return the number of steps to be in flight while so many tokens wait or are computed."""
        return max(1, min(self.most, self.worthwhile(tokens)))


@dataclass
class LaunchedStep:
    """A step that is computed.

    Attributes:
        batch: what it computes.
        begun: when it was launched (`time.monotonic`).
        computed: the entries of `batch` that did not fail, with their logits.
        arriving: what its tokens are sampled from, on the way to the host.
        stages: its passage through the stages; None: it is the only one.
    """

    batch: list[ScheduledTokens]
    begun: float
    computed: list[tuple[ScheduledTokens, torch.Tensor | None]] = field(default_factory=list)
    arriving: Arriving | None = None
    stages: StageStep | None = None

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return sum(scheduled.tokens + len(scheduled.draft) for scheduled in self.batch)
