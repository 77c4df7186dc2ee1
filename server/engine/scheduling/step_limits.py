"""What one of several steps in flight may compute: its part of the sequences and tokens of an engine.

With one step in flight at most, a step is everything that can be computed: the simple case, and what the others are
held against. Of several, each gets its part of the sequences that none computes now, and of the tokens of a step, so
that all together hold no more than one step would.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK


@dataclass(frozen=True)
class StepLimits:
    """The most that one step computes: sequences, and tokens of all of them."""

    sequences: int
    tokens: int


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
