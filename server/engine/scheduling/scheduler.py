"""The scheduler: which sequences compute which tokens in the next step.

First come, first served, but clients take turns, and of one client's requests the lowest priority comes first.
Sequences that generate go first (decode), then prompts, old before new (prefill). When
key-value memory runs out, the youngest running sequence gives its memory back and is recomputed later (preempt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bigmodel.errors import ServeError
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool, round_up
from bigmodel.server.engine.kv.prefix import PrefixCache
from bigmodel.server.engine.scheduling.request import Sequence, SequencePhase
from bigmodel.server.engine.scheduling.step_limits import StepLimits


@dataclass(frozen=True)
class ScheduledTokens:
    """The next ``tokens`` of a sequence, computed in this step, and ``draft`` tokens verified after them."""

    sequence: Sequence
    tokens: int
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step computes the sequence's last token, so that the next one can be sampled."""
        return self.tokens == self.sequence.remaining

    @property
    def is_sampled(self) -> bool:
        """Whether a token is sampled from this step's logits."""
        return self.samples and self.pooled_rows is None

    @property
    def all_logits(self) -> bool:
        """Whether logits of all tokens are needed (log-probabilities of the prompt), not only the last one's."""
        return self.sequence.params.prompt_logprobs and not self.sequence.output

    @property
    def pooled_rows(self) -> int | None:
        """How many of the last states are needed for a vector; None where text is generated."""
        pooling = self.sequence.params.pooling
        return None if pooling is None else self.tokens if pooling.all_rows else int(self.samples)


class SchedulingError(ServeError):
    """Scheduling ``sequence`` raised; the cause says what. What the others hold is as it should be."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"sequence {sequence.index} of request {sequence.request.request_id} cannot be scheduled")
        self.sequence = sequence


RESTORED_BLOCKS = 4
"""Prompt blocks that are read from files in one step in which texts grow, too."""


@contextmanager
def _on_behalf_of(sequence: Sequence) -> Iterator[None]:
    """Raise errors within this context as errors of ``sequence``."""
    try:
        yield
    except Exception as error:
        raise SchedulingError(sequence) from error


class Scheduler:
    """Waiting and running sequences, and the key-value positions they hold, in what ``new_kv`` makes for each.

    ``max_batch_tokens`` bounds the tokens of one step, ``max_sequences`` the sequences that run at once.
    """

    def __init__(
        self,
        pool: TokenPool,
        prefix: PrefixCache,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        new_kv: Callable[[], SequenceKV] = SequenceKV,
    ) -> None:
        if max_batch_tokens < max_sequences + PROMPT_BLOCK:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens} must be at least max_sequences + {PROMPT_BLOCK} "
                f"= {max_sequences + PROMPT_BLOCK}, or prompts could wait forever behind decoding sequences"
            )
        self.pool = pool
        self.prefix = prefix
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self._new_kv = new_kv
        self.waiting: list[Sequence] = []
        self._turns: dict[str, int] = {}  # when each client that waits or runs had its last turn
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self._readable = 0  # blocks that this step may still read from files

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        if sequence.index == 0 and sequence.request.media is None:
            self.prefix.read_ahead(sequence.request.prompt, sequence.request.adapter)
        self.waiting.append(sequence)

    def schedule(self, limits: StepLimits | None = None) -> list[ScheduledTokens]:
        """The tokens of the next step, oldest sequence first; empty when there is nothing to compute.

        ``limits`` are those of one of several steps in flight; None: of the only one. What is in flight is in no other.

        Raises :class:`SchedulingError` when one sequence cannot be scheduled. Once that is finished, call it again.
        """
        limits = limits or StepLimits(self.max_sequences, self.max_batch_tokens)
        batch = self._decode(limits)
        # Texts that grow wait for no long prompt to be read: neither do they for one to be computed.
        self._readable = RESTORED_BLOCKS if batch else self.pool.capacity
        tokens = sum(1 + len(scheduled.draft) for scheduled in batch)
        batch += self._prefill(limits.tokens - tokens, limits.sequences - len(batch))
        return sorted(batch, key=lambda scheduled: scheduled.sequence.order)

    @property
    def ready(self) -> int:
        """Sequences that no step computes now, and that may run."""
        free = sum(not sequence.in_flight for sequence in self.running)
        return free + min(len(self.waiting), max(0, self.max_sequences - len(self.running)))

    @property
    def tokens_at_hand(self) -> int:
        """Tokens that wait to be computed or are computed now, at most those of a step."""
        running = sum(sequence.remaining for sequence in self.running)
        admitted = self.waiting[: max(0, self.max_sequences - len(self.running))]
        return min(self.max_batch_tokens, running + sum(map(len, admitted)))

    def landed(self, sequence: Sequence) -> None:
        """A step that computed the sequence has ended; if that was finished meanwhile, free what it holds."""
        sequence.in_flight = False
        if sequence.phase is SequencePhase.FINISHED and sequence.kv is not None:
            self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free what it holds: once it has landed, if it is in flight."""
        if sequence.phase is SequencePhase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is SequencePhase.RUNNING:
            self.running.remove(sequence)
            if not sequence.in_flight:
                self._release(sequence)
        sequence.phase = SequencePhase.FINISHED

    # --- decode: one token, and its draft, of every sequence that generates -----------------------------

    def _decode(self, limits: StepLimits) -> list[ScheduledTokens]:
        batch: list[ScheduledTokens] = []
        most = min(limits.sequences, limits.tokens)
        # One prompt block of the budget stays free for prefill: drafts never hold prompts up.
        draft_budget = self.max_batch_tokens - self.max_sequences - PROMPT_BLOCK
        for sequence in [s for s in self.running if s.decoding and not s.in_flight]:
            if len(batch) == most:
                break
            with _on_behalf_of(sequence):
                # The iterations before this one may have preempted it.
                if sequence.phase is SequencePhase.RUNNING and self._reserve(sequence):
                    draft = self._affordable_draft(sequence, draft_budget)
                    draft_budget -= len(draft)
                    batch.append(ScheduledTokens(sequence, 1, draft))
        # Sequences preempted after they were scheduled are not computed.
        return [scheduled for scheduled in batch if scheduled.sequence.phase is SequencePhase.RUNNING]

    def _affordable_draft(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """As much of the draft as budget and free memory allow; no sequence is preempted for a draft."""
        assert sequence.kv is not None
        draft = tuple(sequence.draft[: max(0, budget)])
        return draft if self._extend(sequence.kv, round_up(len(sequence) + len(draft))) else ()

    # --- prefill: prompts that were begun, then new sequences --------------------------------------------

    def _prefill(self, budget: int, sequences: int) -> list[ScheduledTokens]:
        batch: list[ScheduledTokens] = []
        for sequence in [s for s in self.running if not s.decoding and not s.in_flight]:
            if len(batch) == sequences:
                break
            tokens = self._chunk(sequence, budget)
            if tokens:
                batch.append(ScheduledTokens(sequence, tokens))
                budget -= tokens
        while self.waiting and len(self.running) < self.max_sequences and budget >= PROMPT_BLOCK:
            if len(batch) == sequences:
                break
            sequence = min(self.waiting, key=self._turn)
            with _on_behalf_of(sequence):
                if self._shares_unfinished_prompt(sequence) or not self._admit(sequence):
                    break
            tokens = self._chunk(sequence, budget)
            if tokens:
                batch.append(ScheduledTokens(sequence, tokens))
                budget -= tokens
        return batch

    def _turn(self, sequence: Sequence) -> tuple[bool, bool, int, int, int]:
        """Place of a waiting sequence: those that gave way, then the client whose last turn is the longest ago. Those
        that are no client's come behind."""
        request = sequence.request
        return (
            not sequence.preemptions,
            not request.client,
            self._turns.get(request.client, 0),
            request.priority,
            sequence.order,
        )

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the sequence that fit ``budget``; a cut within the prompt falls on a block boundary.

        What is in files is read, not computed: 0 where this step may read no more of them.
        """
        with _on_behalf_of(sequence):
            self._restore(sequence)
        if sequence.on_file:
            return 0
        end = sequence.computed + min(budget, sequence.remaining)
        if end < sequence.prompt_length:
            end = end // PROMPT_BLOCK * PROMPT_BLOCK
        return max(0, end - sequence.computed)

    def _shares_unfinished_prompt(self, sequence: Sequence) -> bool:
        """Whether the request's first sequence still computes the prompt that this one will find in the cache."""
        first = sequence.request.sequences[0]
        return (
            self.prefix.enabled
            and sequence.request.media is None
            and first is not sequence
            and first.phase is SequencePhase.RUNNING
            and first.computed < first.prompt_length
            and sequence.prompt_length > PROMPT_BLOCK
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Start the first waiting sequence from its cached prefix; False when memory is short."""
        prompt, adapter = sequence.request.prompt, sequence.request.adapter
        # One position beyond the tokens at hand: a new sequence is not preempted at its first token.
        capacity = min(round_up(len(sequence) + 1), self.pool.capacity)
        self.prefix.match(prompt, adapter)  # marks the blocks as recently used: `_extend` evicts others first
        kv = self._new_kv()
        if not self._extend(kv, capacity):
            return False
        try:
            # Where something is needed of each token of the prompt, none may come from the cache. Nor may it where the
            # placeholders of images are tokens: the same ones stand for any image.
            pooling = sequence.params.pooling
            whole = sequence.params.prompt_logprobs or (pooling is not None and pooling.all_rows)
            whole = whole or sequence.request.media is not None
            cached = 0 if whole else self.prefix.match(prompt, adapter)
            self.prefix.copy_into(kv, prompt, cached, adapter)
            if not whole:
                self.prefix.promise_states(kv, prompt, cached, adapter)
            sequence.on_file = [] if whole else self.prefix.files_after(prompt, cached, adapter)
        except BaseException:
            self.pool.give_back(capacity)
            raise
        self.waiting.remove(sequence)
        self._note_turn(sequence.request.client)
        sequence.kv = kv
        self.prefix.lookups += sequence.prompt_length
        self.prefix.hits += cached
        sequence.computed = cached
        if not sequence.preemptions:  # a recomputed sequence finds its own blocks: those do not count
            sequence.cached_tokens = cached
        sequence.phase = SequencePhase.RUNNING
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.order)
        return True

    def _note_turn(self, client: str) -> None:
        last = max(self._turns.values(), default=0) + 1
        held = {sequence.request.client for sequence in (*self.waiting, *self.running)}
        self._turns = {one: turn for one, turn in self._turns.items() if one in held} | {client: last}

    def _restore(self, sequence: Sequence) -> None:
        """Read the next blocks of a prompt from files, as many as this step may, until one is missing."""
        assert sequence.kv is not None
        files = sequence.on_file[: self._readable]
        if not files:
            return
        begin = sequence.computed // PROMPT_BLOCK
        found = self.prefix.restore(sequence.kv, sequence.request.prompt, begin, files, sequence.request.adapter)
        self._readable -= len(files)
        sequence.on_file = sequence.on_file[len(files) :] if found == len(files) else []
        sequence.computed += found * PROMPT_BLOCK
        if not sequence.preemptions:
            sequence.cached_tokens += found * PROMPT_BLOCK

    # --- preempt: the youngest sequence gives way --------------------------------------------------------

    def _reserve(self, sequence: Sequence) -> bool:
        """Hold positions for all tokens of a running sequence; False when it had to give way itself, or has to wait for
        one that is in flight."""
        assert sequence.kv is not None
        while not self._extend(sequence.kv, round_up(len(sequence))):
            youngest = self.running[-1]
            if youngest.in_flight:
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.phase = SequencePhase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.append(sequence)

    def _extend(self, kv: SequenceKV, capacity: int) -> bool:
        """Reserve ``capacity`` positions, evicting cached prefixes if need be; False when too few can be freed."""
        more = capacity - kv.capacity
        if more <= 0:
            return True
        if not (self.prefix.shrink(more) and self.pool.take(more)):
            return False
        try:
            kv.reserve(capacity)
        except BaseException:
            self.pool.give_back(more)
            raise
        return True

    def _release(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.prefix.break_promise(sequence.kv)
        self.pool.give_back(sequence.kv.capacity)
        sequence.kv = None
        sequence.computed = 0
