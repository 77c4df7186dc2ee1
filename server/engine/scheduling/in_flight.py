"""Steps in flight: how the sequences and tokens of an engine are divided among steps that are computed at once.

With one step in flight at most, a step is everything that can be computed: the simple case, and what the others are
held against. With several, each gets its part of the sequences that none computes now, and of the tokens of a step, so
that all together hold no more than one step would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK

if TYPE_CHECKING:
    import torch

    from bigmodel.dispatch.transfer.stages import StagePipeline, StageStep
    from bigmodel.server.engine.sampling.sampler import Arriving
    from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens


@dataclass(frozen=True)
class StepLimits:
    """The most that one step computes: sequences, and tokens of all of them."""

    sequences: int
    tokens: int


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


def limits_of_step(waiting: int, computed: int, tokens: int, steps: int, left: int) -> StepLimits:
    """Return what the next step may compute, so that all steps get as much.

    A step is as slow as its largest part: of more than its share of all sequences it leaves some to the next ones.

    Args:
        waiting: sequences that could be computed now.
        computed: sequences in flight.
        tokens: tokens of a step that no step in flight has taken.
        steps: steps in flight at most.
        left: how many of them may yet be launched, this one included.
    """
    sequences = max(1, min(-(-waiting // left), -(-(waiting + computed) // steps)))
    # A prompt needs a whole block, or it could wait forever.
    return StepLimits(sequences, max(tokens // left, min(tokens, sequences + PROMPT_BLOCK)))
