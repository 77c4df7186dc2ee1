"""One step of the engine, without threads: schedule, compute, sample, send text; and the unfinished requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from bigmodel.checkpoint.mapping import mapped_file
from bigmodel.dispatch.transfer.files import SourceFile, SourceFiles
from bigmodel.errors import CheckpointFormatError, KVDiskError
from bigmodel.server.engine.compute.draft import Drafter
from bigmodel.server.engine.compute.encoder import EncoderRunner
from bigmodel.server.engine.compute.runner import Runner
from bigmodel.server.engine.in_flight import InFlight, LaunchedStep
from bigmodel.server.engine.sampling.sampler import Sampler, TokenCounts, logprob_of
from bigmodel.server.engine.scheduling.request import (
    Delta,
    Done,
    Failed,
    Observer,
    Request,
    Sequence,
    SequencePhase,
    TokenLogprob,
)
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens, Scheduler, SchedulingError
from bigmodel.server.engine.scheduling.step_limits import limits_of_step
from bigmodel.server.text.codec import Detokenizer, StopChecker, TextCodec

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.01
"""How long a step waits for masks of grammars where there is nothing to compute: requests come meanwhile."""


class OutputStream:
    """The text of one sequence as it grows: tokens are decoded, stop strings end it, deltas carry it away.

    Tokens whose text is held back (a partial character, a possible beginning of a stop string) travel with the delta
    that shows it. ``max_length`` bounds prompt plus output, in tokens.
    """

    def __init__(self, sequence: Sequence, codec: TextCodec, eos_ids: frozenset[int], max_length: int) -> None:
        self._sequence = sequence
        self._ends = (frozenset() if sequence.params.ignore_eos else eos_ids) | sequence.params.stop_token_ids
        sequence.ends = self._ends
        self._limit = min(sequence.params.max_tokens, max_length - sequence.prompt_length)
        self._detokenizer = Detokenizer(codec, sequence.request.prompt, sequence.params.kept_special)
        self._stop = StopChecker(sequence.params.stop)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def at_limit(self) -> bool:
        """Whether the sequence is as long as it may be."""
        return len(self._sequence.output) >= self._limit

    def take(self, token_id: int, logprob: TokenLogprob | None, *, at_limit: bool = True) -> Delta | None:
        """Add a token (already in ``sequence.output``); a delta if there is text to send or the sequence ends.

        With ``at_limit`` False its length does not end it.
        """
        if token_id in self._ends:
            return self.finish("stop")
        self._tokens.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        text, stopped = self._stop.push(self._detokenizer.add(token_id))
        if stopped:
            return self._delta(text, "stop")
        grammar = self._sequence.grammar_state
        if grammar is not None and grammar.complete:
            return self.finish("stop", text)
        if at_limit and self.at_limit:
            return self.finish("length", text)
        return self._delta(text, None) if text else None

    def finish(self, reason: str, text: str = "") -> Delta:
        """The last delta: ``text`` and everything that was held back."""
        shown, stopped = self._stop.push(self._detokenizer.flush())
        text += shown
        if not stopped:
            text += self._stop.flush()
        return self._delta(text, "stop" if stopped else reason)

    def _delta(self, text: str, reason: str | None) -> Delta:
        delta = Delta(
            self._sequence.index,
            text,
            tuple(self._tokens),
            tuple(self._logprobs),
            finish_reason=reason,
            stop=None if reason is None else self._stop.found,
        )
        self._tokens, self._logprobs = [], []
        return delta


class WeightFiles:
    """The files that are mapped as weights of some models, also as weights that count as memory.

    Args:
        models: The models; None stands for one that there is not.
    """

    def __init__(self, *models: torch.nn.Module | None) -> None:
        opened = SourceFiles()
        self._files: dict[SourceFile, int] = {}
        for model in models:
            for tensor in () if model is None else (*model.parameters(), *model.buffers()):
                region = mapped_file(tensor)
                file = None if region is None else opened.get(region)
                if region is not None and file is not None:  # the map of a file that is gone shows its old bytes
                    self._files[file] = region.nbytes

    def check(self) -> None:
        """Raise CheckpointFormatError if one is shorter than its map: reading it there would end the process (SIGBUS).

        Takes about a microsecond for each file.
        """
        for file, nbytes in self._files.items():
            size = file.size()
            if size < nbytes:
                raise CheckpointFormatError(
                    f"{file.path}: is {size} bytes long and had {nbytes} when it was mapped: it was cut short while in "
                    "use; copy or download it again"
                )


class EngineCore:
    """Owns the unfinished requests. Single-threaded; :class:`bigmodel.server.engine.engine.Engine` runs it in a thread.

    An exception in one sequence's part of a step fails its request; the others get the tokens they would have got.

    ``max_length`` bounds prompt plus output of a sequence, in tokens; ``vocabulary_size`` is the width of the model's
    logits; ``eos_ids`` are the tokens that end a text. ``in_flight``: several steps are computed at once, in the stages
    of the model; None: one at a time. ``check_weights`` raises CheckpointFormatError when a file of weights was cut
    short.
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
        in_flight: InFlight | None = None,
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.drafter = drafter
        self.in_flight = in_flight
        self.codec = codec
        self.eos_ids = eos_ids
        self.max_length = max_length
        self.vocabulary_size = vocabulary_size
        self.requests: dict[str, Request] = {}
        self.steps = 0
        self._observer = observer
        self._check_weights = check_weights
        self._launched: deque[LaunchedStep] = deque()  # in the order in which they land
        self._sampler = Sampler(observer, self._send, self._fail_sampling)

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch a step or land one; return False if there was nothing to do.

        The oldest one lands, and its tokens are sampled, once as many are in flight as may be: at once, if that is one.
        Where only masks of grammars are awaited, it waits a moment for them.
        """
        finished = self._sampler.finish_late()
        for sequence in finished:
            self.scheduler.landed(sequence)
        self._hold_late()
        steps = 1 if self.in_flight is None else self.in_flight.steps(self.scheduler.tokens_at_hand)
        launched = self._launch(steps) if len(self._launched) < steps else None
        if launched is not None:
            self._launched.append(launched)
            if len(self._launched) < steps:
                return True
        if self._launched:
            self._land(self._launched.popleft())
            return True
        if self._sampler.late:
            self._sampler.wait_for_late(LATE_SECONDS)
            return True
        if self.requests:
            raise RuntimeError(f"{len(self.requests)} requests wait and none can be scheduled")
        return bool(finished)

    def _hold_late(self) -> None:
        """Keep sequences whose masks have not come out of further steps."""
        for scheduled, _ in self._sampler.late:
            scheduled.sequence.in_flight = True

    def _launch(self, steps: int) -> LaunchedStep | None:
        """Launch the next step, of so many in flight at most; None if nothing more can be computed now."""
        if not self._weights_are_whole():
            return None
        self._propose()
        batch = self._begun(steps)
        if not batch:
            return None
        launched = LaunchedStep(batch, time.monotonic())
        self._note_starts(batch, launched.begun)
        for scheduled in batch:
            scheduled.sequence.in_flight = True
        try:
            with nullcontext() if self.in_flight is None else self.in_flight.pipeline.step() as stages:
                launched.stages = stages
                launched.computed = self._compute(batch)
                sampled = [(each, rows) for each, rows in launched.computed if rows is not None and each.is_sampled]
                launched.arriving = self._sampler.begin(sampled, wait=stages is None)
        except BaseException:
            for scheduled in batch:
                self.scheduler.landed(scheduled.sequence)
            raise
        return launched

    def _begun(self, steps: int) -> list[ScheduledTokens]:
        """The tokens of the next step; the masks that the next ones are sampled with are computed beside it."""
        while batch := self._schedule(steps):
            for scheduled in batch:
                state = scheduled.sequence.grammar_state
                try:
                    if state is not None:
                        state.begin()
                        state.propose(scheduled.draft)
                except Exception as error:
                    self._fail_step(scheduled.sequence.request, error)
            begun = [scheduled for scheduled in batch if scheduled.sequence.phase is SequencePhase.RUNNING]
            if begun:
                return begun
        return []

    def _weights_are_whole(self) -> bool:
        """Whether no file of weights was cut short. If one was, all requests fail; later ones may find it mended."""
        try:
            self._check_weights()
        except CheckpointFormatError as error:
            logger.error("%d requests failed: %s", len(self.requests), error)
            for request in list(self.requests.values()):
                self.fail(request, "engine", "a file of the model's weights was cut short while in use")
            return False
        return True

    def _land(self, launched: LaunchedStep) -> None:
        """Wait for a step, and send the text of the tokens that are sampled."""
        failure = self._awaited(launched)
        for scheduled in launched.batch:
            self.scheduler.landed(scheduled.sequence)
        for scheduled, rows in launched.computed:
            sequence = scheduled.sequence
            if sequence.phase is not SequencePhase.RUNNING:
                continue  # it was cancelled, or another sequence of its request failed
            try:
                if failure is not None:
                    raise failure
                self._account(scheduled, rows)
            except Exception as error:
                self._fail_step(sequence.request, error)
        assert launched.arriving is not None
        self._sampler.finish(launched.arriving)
        self._hold_late()
        self.scheduler.prefix.write()
        self.steps += 1
        self._observer.step(time.monotonic() - launched.begun, len(launched.batch))

    def _awaited(self, launched: LaunchedStep) -> Exception | None:
        """Wait for a step; return the error of an operation that failed after it had been launched.

        Raises if the model can no longer compute anything.
        """
        try:
            if launched.stages is not None:
                launched.stages.land()
        except Exception as error:
            logger.exception("a step of %d sequences failed after it had been launched", len(launched.batch))
            self.runner.probe()  # raises if the model is broken
            return error
        return None

    def _propose(self) -> None:
        if self.drafter is None:
            return
        decoding = [s for s in self.scheduler.running if s.decoding and s.takes_drafts]
        try:
            self.drafter.propose(decoding)
        except Exception:
            logger.exception("the draft model failed for %d sequences; it is asked for each alone", len(decoding))
        else:
            return
        for sequence in decoding:
            try:
                self.drafter.propose([sequence])
            except Exception as error:
                logger.error("request %s goes on without drafts: %s", sequence.request.request_id, error)
                sequence.takes_drafts = False
                sequence.draft = []

    def _schedule(self, steps: int) -> list[ScheduledTokens]:
        scheduler = self.scheduler
        while True:
            limits = None
            if steps > 1 or self._launched:
                flying = sum(len(launched.batch) for launched in self._launched)
                tokens = scheduler.max_batch_tokens - sum(launched.tokens for launched in self._launched)
                limits = limits_of_step(scheduler.ready, flying, tokens, steps, steps - len(self._launched))
            try:
                return scheduler.schedule() if limits is None else scheduler.schedule(limits)
            except SchedulingError as error:
                self._fail_step(error.sequence.request, error.__cause__ or error)

    def _compute(self, batch: list[ScheduledTokens]) -> list[tuple[ScheduledTokens, torch.Tensor | None]]:
        """Return the logits of each entry. If the step raises, sequences are computed alone, and those that raise fail.

        Raises if the model can no longer compute anything: then the engine has failed, not a sequence.
        """
        try:
            return list(zip(batch, self._run(batch), strict=True))
        except KVDiskError as error:
            logger.warning("a step of %d sequences failed; each is computed alone: %s", len(batch), str(error))
        except Exception:
            logger.exception("a step of %d sequences failed; each is computed alone", len(batch))
        self.runner.probe()  # raises if the model is broken
        computed: list[tuple[ScheduledTokens, torch.Tensor | None]] = []
        for scheduled in batch:
            sequence = scheduled.sequence
            if sequence.phase is not SequencePhase.RUNNING:
                continue  # another sequence of the request failed
            assert sequence.kv is not None
            sequence.kv.model_cache = None  # the failed step may have advanced it
            try:
                (rows,) = self._run([scheduled])
            except Exception as error:
                self._fail_step(sequence.request, error)
            else:
                computed.append((scheduled, rows))
        return [(scheduled, rows) for scheduled, rows in computed if scheduled.sequence.phase is SequencePhase.RUNNING]

    def _run(self, batch: list[ScheduledTokens]) -> list[torch.Tensor | None]:
        with nullcontext() if self.drafter is None else self.drafter.watching(batch):
            return self.runner.run(batch)

    def _note_starts(self, batch: list[ScheduledTokens], now: float) -> None:
        for sequence in (scheduled.sequence for scheduled in batch):
            if sequence.started_at is None:
                sequence.started_at = now
                if sequence.index == 0:
                    self._observer.started(sequence.request, now - sequence.request.arrived)

    def _account(self, scheduled: ScheduledTokens, rows: torch.Tensor | None) -> None:
        """Count the computed tokens; cache a completed prompt and keep its log-probabilities."""
        sequence = scheduled.sequence
        start, sequence.computed = sequence.computed, sequence.computed + scheduled.tokens
        prompt = sequence.prompt_length
        if start < prompt:
            self._observer.tokens(min(sequence.computed, prompt) - start, 0)
            if sequence.params.prompt_logprobs and rows is not None and not sequence.output:
                self._note_prompt_logprobs(sequence, start, rows)
            if sequence.computed >= prompt and sequence.kv is not None and sequence.request.media is None:
                self.scheduler.prefix.insert(sequence.kv, sequence.request.prompt, sequence.request.adapter)
        if sequence.pooler is not None:
            if rows is not None:
                sequence.pooler.add(rows, sequence.computed)
            if sequence.remaining == 0:
                self._send(sequence, Delta(sequence.index, "", finish_reason="stop", vector=sequence.pooler.vector()))

    def _note_prompt_logprobs(self, sequence: Sequence, start: int, rows: torch.Tensor) -> None:
        if start == 0:
            sequence.prompt_logprobs = [None]  # nothing predicts the first token
        following = sequence.token_slice(start + 1, min(start + 1 + len(rows), sequence.prompt_length))
        for row, token_id in zip(rows.cpu(), following, strict=False):
            sequence.prompt_logprobs.append(logprob_of(row, token_id, sequence.params.logprobs or 0))

    def _send(self, sequence: Sequence, delta: Delta) -> None:
        request = sequence.request
        if sequence.prompt_logprobs and not sequence.prompt_logprobs_sent:
            sequence.prompt_logprobs_sent = True
            delta = replace(delta, prompt_logprobs=tuple(sequence.prompt_logprobs))
        request.sink.put(delta)
        if delta.finish_reason is not None:
            self._end(sequence)
            if request.finished:
                self._complete(request)

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request and queue its sequences; it fails if its text or its grammar cannot start."""
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        try:
            for sequence in request.sequences:
                sequence.takes_drafts = request.media is None
                sequence.stream = OutputStream(sequence, self.codec, self.eos_ids, self.max_length)
                if request.params.grammar is not None:
                    sequence.grammar_state = request.params.grammar.state()
                if request.params.pooling is not None:
                    sequence.pooler = request.params.pooling.state()
                if request.params.reasoning is not None:
                    sequence.reasoning_state = request.params.reasoning.state()
        except Exception as error:
            self._fail_step(request, error)

    def fail(self, request: Request, kind: str, message: str) -> None:
        """End a request early: its memory is freed at once, and its sink receives :class:`Failed`."""
        if self.requests.pop(request.request_id, None) is None:
            return
        for sequence in request.sequences:
            if sequence.phase is not SequencePhase.FINISHED:
                self._end(sequence)
        self._observer.finished(request, kind, time.monotonic() - request.arrived)
        self._send_failure(request, Failed(kind, message))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        if sequence.grammar_state is not None:
            sequence.grammar_state.close()

    def _send_failure(self, request: Request, failed: Failed) -> None:
        try:
            request.sink.put(failed)
        except Exception:  # nothing else is held for the request, and nobody else can be told
            logger.exception("the failure of request %s could not be sent", request.request_id)

    def _fail_step(self, request: Request, error: BaseException) -> None:
        if isinstance(error, KVDiskError):
            logger.error("request %s failed: %s", request.request_id, str(error))
            self.fail(request, "engine", f"keys and values cannot be kept on disk: {error.why}")
            return
        logger.error("request %s failed", request.request_id, exc_info=error)
        self.fail(request, "engine", f"computing a step failed: {type(error).__name__}")

    def _fail_sampling(self, request: Request, message: str) -> None:
        self.fail(request, "engine", message)

    def close(self) -> None:
        """Wait for the steps in flight, whose results nobody takes any more: the model may go then."""
        while self._launched:
            launched = self._launched.popleft()
            try:
                if launched.stages is not None:
                    launched.stages.land()
            except Exception:  # nothing depends on it
                logger.exception("a step of %d sequences failed as the engine was closed", len(launched.batch))
            for scheduled in launched.batch:
                self.scheduler.landed(scheduled.sequence)
        for sequence in self._sampler.finish_late():
            self.scheduler.landed(sequence)

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed."""
        late = [r for r in self.requests.values() if r.deadline is not None and now >= r.deadline]
        for request in late:
            self.fail(request, "timeout", f"not finished {now - request.arrived:.1f} s after it arrived")

    def _complete(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._observer.finished(request, "ok", time.monotonic() - request.arrived)
        # The first sequence's: the others find in the cache what it computed for them.
        cached = request.sequences[0].cached_tokens
        try:
            request.sink.put(Done(len(request.prompt), request.completion_tokens, cached))
        except Exception:
            logger.exception("the end of request %s could not be sent", request.request_id)
            self._send_failure(request, Failed("engine", "the end of the answer could not be sent"))

    @property
    def generates(self) -> bool:
        """Whether the model generates text; else it gives vectors or scores."""
        return not isinstance(self.runner, EncoderRunner)

    @property
    def counts(self) -> TokenCounts:
        """Tokens sampled and drafted so far."""
        return self._sampler.counts

    @property
    def steps_now(self) -> int:
        """Steps that are in flight."""
        return len(self._launched)

    @property
    def idle(self) -> bool:
        """Whether all requests are finished, and all steps have landed."""
        return not (self.requests or self._launched or self._sampler.late)
