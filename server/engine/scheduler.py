"""Which sequences compute which tokens in the next step.

Three blocks: decode what runs, continue the prompts that were begun, admit who waits. First come, first
served: an older sequence is never held up by a younger one; when memory runs out the youngest gives way and
is recomputed later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bigmodel.server.engine.attention import PROMPT_BLOCK
from bigmodel.server.engine.cache import SequenceKV, round_up
from bigmodel.server.engine.pool import TokenPool
from bigmodel.server.engine.prefix import PrefixCache
from bigmodel.server.engine.request import Phase, Sequence


@dataclass(frozen=True)
class Grant:
    """``tokens`` more of a sequence to compute in this step, and ``draft`` tokens that may follow them."""

    sequence: Sequence
    tokens: int
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step computes the sequence's last token, so that the next one can be chosen."""
        return self.tokens == self.sequence.remaining


class Scheduler:
    """Waiting and running sequences, and the memory they hold.

    ``max_batch_tokens`` bounds the tokens of one step, ``max_sequences`` those that run at once.
    """

    def __init__(self, pool: TokenPool, prefix: PrefixCache, *, max_sequences: int, max_batch_tokens: int) -> None:
        if max_batch_tokens < max_sequences + PROMPT_BLOCK:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens} must be at least max_sequences + {PROMPT_BLOCK} "
                f"= {max_sequences + PROMPT_BLOCK}, or a prompt could wait for ever behind decoding sequences"
            )
        self.pool = pool
        self.prefix = prefix
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Grant]:
        """The grants of the next step; empty when there is nothing to do."""
        grants: list[Grant] = []
        budget = self.max_batch_tokens - self._decode(grants)
        budget -= self._continue_prompts(grants, budget)
        self._admit(grants, budget)
        grants.sort(key=lambda grant: grant.sequence.order)
        return grants

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.phase = Phase.FINISHED

    # --- decode -----------------------------------------------------------------------------------

    def _decode(self, grants: list[Grant]) -> int:
        # A block of the budget is left for prompts, so that guesses never hold them up.
        spare = self.max_batch_tokens - self.max_sequences - PROMPT_BLOCK
        for sequence in [s for s in self.running if s.decoding]:
            # An earlier turn of this loop may have preempted it.
            if sequence.phase is Phase.RUNNING and self._make_room(sequence, len(sequence)):
                draft = self._affordable(sequence, spare)
                spare -= len(draft)
                grants.append(Grant(sequence, 1, draft))
        # A sequence granted before its turn came to be preempted is granted no longer.
        grants[:] = [grant for grant in grants if grant.sequence.phase is Phase.RUNNING]
        return sum(1 + len(grant.draft) for grant in grants)

    def _affordable(self, sequence: Sequence, spare: int) -> tuple[int, ...]:
        """As many guesses as the budget and free memory allow; nobody gives way for a guess."""
        draft = tuple(sequence.draft[: max(0, spare)])
        assert sequence.kv is not None
        capacity = round_up(len(sequence) + len(draft))
        more = capacity - sequence.kv.capacity
        if more > 0 and not self._take(more):
            return ()
        sequence.kv.reserve(capacity)
        return draft

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Hold buffers for ``tokens`` of a running sequence, at the youngest's cost if need be."""
        assert sequence.kv is not None
        more = round_up(tokens) - sequence.kv.capacity
        while more > 0 and not self._take(more):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.kv.reserve(round_up(tokens))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    # --- prompts ----------------------------------------------------------------------------------

    def _continue_prompts(self, grants: list[Grant], budget: int) -> int:
        spent = 0
        for sequence in self.running:
            if not sequence.decoding:
                tokens = self._portion(sequence, budget - spent)
                if tokens:
                    grants.append(Grant(sequence, tokens))
                    spent += tokens
        return spent

    def _admit(self, grants: list[Grant], budget: int) -> None:
        while self.waiting and len(self.running) < self.max_sequences and budget >= PROMPT_BLOCK:
            sequence = self.waiting[0]
            if self._leader_at_work(sequence) or not self._start(sequence):
                return
            self.waiting.popleft()
            tokens = self._portion(sequence, budget)
            grants.append(Grant(sequence, tokens))
            budget -= tokens

    def _leader_at_work(self, sequence: Sequence) -> bool:
        """Whether the first choice of the same request still computes the prompt that this one will share."""
        leader = sequence.request.sequences[0]
        return (
            self.prefix.enabled
            and leader is not sequence
            and leader.phase is Phase.RUNNING
            and leader.computed < leader.prompt_length
            and sequence.prompt_length > PROMPT_BLOCK
        )

    def _start(self, sequence: Sequence) -> bool:
        prompt = sequence.request.prompt
        # Log-probabilities of the prompt need all its logits: nothing of it may come from the cache.
        usable = not sequence.params.prompt_logprobs
        # One growth step beyond the tokens at hand, so that a new sequence is not preempted at once.
        capacity = min(round_up(len(sequence) + 1), self.pool.capacity)
        self.prefix.match(prompt)  # marks what is about to be used, so that making room spares it
        if not self._take(capacity):
            return False
        cached = self.prefix.match(prompt) if usable else 0
        sequence.kv = SequenceKV()
        sequence.kv.reserve(capacity)
        self.prefix.copy_into(sequence.kv, prompt, cached)
        self.prefix.lookups += sequence.prompt_length
        self.prefix.hits += cached
        sequence.computed = cached
        if not sequence.preemptions:  # what it finds of its own when it is recomputed was not there when it came
            sequence.cached_tokens = cached
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.order)
        return True

    def _portion(self, sequence: Sequence, budget: int) -> int:
        """How many of the sequence's tokens fit ``budget``; a cut within a prompt falls on a block border."""
        end = sequence.computed + min(budget, sequence.remaining)
        if end < sequence.prompt_length:
            end = end // PROMPT_BLOCK * PROMPT_BLOCK
        return max(0, end - sequence.computed)

    # --- memory -----------------------------------------------------------------------------------

    def _take(self, positions: int) -> bool:
        return self.prefix.shrink(positions) and self.pool.take(positions)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.pool.give_back(sequence.kv.capacity)
        sequence.kv = None
        sequence.computed = 0
