"""The requests at work, and one turn of the engine without threads: schedule, compute, choose tokens, send text."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from bigmodel.server.engine.choice import Choice
from bigmodel.server.engine.draft import Drafter
from bigmodel.server.engine.next_tokens import NextTokens, TokenCounts
from bigmodel.server.engine.observer import Observer
from bigmodel.server.engine.request import Delta, Done, Failed, Phase, Request, Sequence
from bigmodel.server.engine.runner import Runner
from bigmodel.server.engine.sampler import logprob_of
from bigmodel.server.engine.scheduler import Grant, Scheduler
from bigmodel.server.text.codec import TextCodec


class EngineCore:
    """Owns the requests at work. Single-threaded; :class:`bigmodel.server.engine.engine.Engine` gives it a thread.

    ``max_length`` bounds prompt plus output of a sequence, in tokens; ``vocabulary_size`` is the
    width of the model's logits; ``eos_ids`` are the tokens that end a text.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        codec: TextCodec,
        observer: Observer,
        *,
        eos_ids: frozenset[int],
        max_length: int,
        vocabulary_size: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.requests: dict[str, Request] = {}
        self.drafter = drafter
        self.steps = 0
        self.codec = codec
        self._observer = observer
        self._next_tokens = NextTokens(observer, self._send, self._fail_choosing)
        self.eos_ids = eos_ids
        self.max_length = max_length
        self.vocabulary_size = vocabulary_size

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in; its sequences wait for their turn."""
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            sequence.text = Choice(sequence, self.codec, self.eos_ids, self.max_length)
            if request.params.grammar is not None:
                sequence.grammar_state = request.params.grammar.state()
            self.scheduler.add(sequence)

    def fail(self, request: Request, kind: str, message: str) -> None:
        """End a request early: its slots and memory are free at once, and it is told why."""
        if self.requests.pop(request.request_id, None) is None:
            return
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self.scheduler.finish(sequence)
        self._observer.finished(request, kind, time.monotonic() - request.arrived)
        request.sink.put(Failed(kind, message))

    def _fail_choosing(self, request: Request, message: str) -> None:
        self.fail(request, "engine", message)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        late = [r for r in self.requests.values() if r.deadline is not None and now >= r.deadline]
        for request in late:
            self.fail(request, "timeout", f"not finished {now - request.arrived:.1f} s after it arrived")

    @property
    def counts(self) -> TokenCounts:
        """Tokens chosen and guessed so far."""
        return self._next_tokens.counts

    @property
    def idle(self) -> bool:
        return not self.requests

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one step. False when there was nothing to compute."""
        if self.drafter is not None:
            self.drafter.propose([s for s in self.scheduler.running if s.decoding])
        grants = self.scheduler.schedule()
        if not grants:
            if self.requests:
                raise RuntimeError(f"{len(self.requests)} requests wait and none can be scheduled")
            return False
        begun = time.monotonic()
        self._note_starts(grants, begun)
        logits = self.runner.run(grants)
        for grant, rows in zip(grants, logits, strict=True):
            self._account(grant, rows)
        self._next_tokens.choose(
            [(g, rows) for g, rows in zip(grants, logits, strict=True) if rows is not None and _caught_up(g)]
        )
        self.steps += 1
        self._observer.step(time.monotonic() - begun, len(grants))
        return True

    def _note_starts(self, grants: list[Grant], now: float) -> None:
        for grant in grants:
            if grant.sequence.started_at is None:
                grant.sequence.started_at = now
                if grant.sequence.index == 0:
                    request = grant.sequence.request
                    self._observer.started(request, now - request.arrived)

    def _account(self, grant: Grant, rows: torch.Tensor | None) -> None:
        sequence = grant.sequence
        start, sequence.computed = sequence.computed, sequence.computed + grant.tokens
        prompt = sequence.prompt_length
        if start < prompt:
            self._observer.tokens(min(sequence.computed, prompt) - start, 0)
            if sequence.params.prompt_logprobs and rows is not None and not sequence.output:
                self._note_prompt_logprobs(sequence, start, rows)
            if sequence.computed >= prompt and sequence.kv is not None:
                self.scheduler.prefix.insert(sequence.kv, sequence.request.prompt)

    def _note_prompt_logprobs(self, sequence: Sequence, start: int, rows: torch.Tensor) -> None:
        if start == 0:
            sequence.prompt_logprobs = [None]  # nothing predicts the first token
        following = sequence.token_slice(start + 1, min(start + 1 + len(rows), sequence.prompt_length))
        for row, token_id in zip(rows, following, strict=False):
            sequence.prompt_logprobs.append(logprob_of(row, token_id, sequence.params.logprobs or 0))

    def _send(self, sequence: Sequence, delta: Delta) -> None:
        request = sequence.request
        if sequence.prompt_logprobs and not sequence.prompt_sent:
            sequence.prompt_sent = True
            delta = replace(delta, prompt_logprobs=tuple(sequence.prompt_logprobs))
        request.sink.put(delta)
        if delta.finish_reason is not None:
            self.scheduler.finish(sequence)
            if request.finished:
                self._complete(request)

    def _complete(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._observer.finished(request, "ok", time.monotonic() - request.arrived)
        # The first choice's: the others find what it has computed for them.
        cached = request.sequences[0].cached_tokens
        request.sink.put(Done(len(request.prompt), request.completion_tokens, cached))


def _caught_up(grant: Grant) -> bool:
    """Whether the step computed all of the sequence's tokens, so that the next one can be chosen."""
    return grant.sequence.remaining == 0
