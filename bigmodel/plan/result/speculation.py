"""`Speculation`: for how many proposed tokens a wider pass is worth its seconds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ...limits import ACCEPTANCE

SPECULATION = "speculation"
"""Its name among the counters of `dispatch_stats`."""

WORTHWHILE = 1.1
"""Proposals must be predicted to make tokens come so many times as fast: predictions err by about a tenth."""


@dataclass(frozen=True)
class Speculation:
    """Predicted seconds of passes over several tokens, by which proposed tokens are verified where that is faster.

    A pass over weights that are streamed takes as long for five tokens as for one; in a mixture more tokens choose more
    experts, and each that is missing is fetched.

    Attributes:
        most: tokens proposed for each sequence of a step, at most.
        seconds: pairs of the number of tokens that a pass of generation computes, of all sequences together, and its
            predicted seconds; in rising numbers.
        acceptance: expected probability that a proposed token is accepted if all before it were.
        proposing: seconds in which one token is proposed for each sequence, such as those of a pass of a draft model.
    """

    most: int
    seconds: tuple[tuple[int, float], ...]
    acceptance: float = ACCEPTANCE
    proposing: float = 0.0

    def pass_seconds(self, tokens: int) -> float:
        """Return the seconds of a pass over `tokens`: between the predicted ones, and beyond them, in proportion."""
        numbers = [number for number, _ in self.seconds]
        right = min(max(bisect_left(numbers, tokens), 1), len(numbers) - 1)
        (one, least), (other, most) = self.seconds[right - 1], self.seconds[right]
        return least + (most - least) * (tokens - one) / (other - one)

    def length(self, count: int) -> float:
        """Return the expected number of tokens that a step with `count` proposals adds to a sequence."""
        return sum(self.acceptance**accepted for accepted in range(count + 1))

    def gain(self, count: int, sequences: int = 1) -> float:
        """Return how many times faster tokens are expected to come with `count` proposals for each sequence."""
        together = self.pass_seconds(sequences * (1 + count)) + count * self.proposing
        return self.length(count) * self.pass_seconds(sequences) / together

    def count(self, sequences: int = 1) -> int:
        """Return the number of proposals for each of so many sequences with which tokens come fastest; 0: none, unless
        they come `WORTHWHILE` times as fast."""
        best = max(range(self.most + 1), key=lambda count: (self.gain(count, sequences), -count))
        return best if self.gain(best, sequences) >= WORTHWHILE else 0

    def pays(self, sequences: int) -> bool:
        """Whether proposals are faster for any number of sequences up to this one."""
        return any(self.count(number) for number in range(1, sequences + 1))

    def figures(self, sequences: int = 1) -> dict[str, float]:
        """Return `most`, the number of proposals that is fastest for so many sequences (`tokens`), and how many times
        faster that is (`gain`)."""
        count = self.count(sequences)
        return {"most": self.most, "tokens": count, "gain": self.gain(count, sequences)}

    def describe(self, sequences: int = 1) -> str:
        """Return a sentence about proposals for so many sequences at once."""
        count = self.count(sequences)
        tried = count or self.most
        ratio = self.pass_seconds(sequences * (1 + tried)) / self.pass_seconds(sequences)
        of = "of one sequence" if sequences == 1 else f"of each of {sequences} sequences"
        figures = (
            f"a pass over {_tokens(1 + tried)} {of} takes {ratio:.2f} times as long as over one, "
            f"and adds {self.length(tried):.2f} where {self.acceptance:.0%} of proposals are accepted"
        )
        if count:
            return f"speculation: {_tokens(count)} proposed for each sequence of a step: {figures}"
        return f"speculation is off, as it is predicted to be slower: {figures}"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
