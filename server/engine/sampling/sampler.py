"""Sampling: from the logits of a step to the next tokens of each sequence.

:class:`Sampler` handles the batch; :func:`choose` samples one token by a sequence's own parameters and random numbers.

Logits come to the host once in a step: as tokens, if all are greedy, else the rows of the whole batch together. Tokens
are drawn on the host, whose sums do not depend on the batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from bigmodel.devices import HOST
from bigmodel.devices.streams import Event, compute_mark, has_streams
from bigmodel.errors import ServeError
from bigmodel.server.engine.sampling.grammar_matching import wait_for
from bigmodel.server.engine.scheduling.request import Delta, Observer, Request, Sequence, SequencePhase, TokenLogprob
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

logger = logging.getLogger(__name__)

_FEW = 256  # tokens among which top_p usually ends
_COLDEST = 1e-30  # lowest temperature: only the likeliest token is left; below, the division may overflow


MASKS_SECONDS = 0.02
"""How long a step waits for masks of grammars, for all its sequences together."""


class NotNumbersError(ServeError):
    """The model's logits are NaN, so no token can be sampled."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers; its data type may be too narrow for it")


# --- a batch ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arriving:
    """What the tokens of a step are sampled from, on its way to the host.

    Attributes:
        batch: entries of the step, with their logits.
        greedy: the likeliest token of each entry, -1 for NaN, where all are greedy.
        rows: the rows of all entries that are sampled from, where not all are.
        arrived: when either is on the host; None: it is there.
    """

    batch: Seq[tuple[ScheduledTokens, torch.Tensor]]
    greedy: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    arrived: Event | None = None


@dataclass
class TokenCounts:
    """Tokens so far: sampled, proposed by a draft model, and accepted of those."""

    generated: int = 0
    drafted: int = 0
    accepted: int = 0


class Sampler:
    """Samples the next tokens of the sequences of a step.

    ``send`` receives the new text of a sequence; ``fail`` a request for which no token can be sampled, and why.
    """

    def __init__(
        self, observer: Observer, send: Callable[[Sequence, Delta], None], fail: Callable[[Request, str], None]
    ) -> None:
        self.counts = TokenCounts()
        self.late: list[tuple[ScheduledTokens, torch.Tensor | None]] = []
        """What is sampled once the mask of its grammar has come, with its logits; without any, only whether it is
        complete is asked."""
        self._chosen: list[tuple[ScheduledTokens, torch.Tensor, int]] = []
        self._observer = observer
        self._send = send
        self._fail = fail

    def sample(self, batch: Seq[tuple[ScheduledTokens, torch.Tensor]]) -> None:
        """Sample for each entry from its logits [tokens, vocabulary]; unadjusted greedy ones in one operation.

        An error fails its own request only (a grammar that no token continues, logits that are NaN).
        """
        self.finish(self.begin(batch))

    def begin(self, batch: Seq[tuple[ScheduledTokens, torch.Tensor]], *, wait: bool = True) -> Arriving:
        """Bring to the host what `finish` samples from: rows of the whole batch together, or greedy tokens.

        Without ``wait`` the host does not wait for it here, on devices with streams.
        """
        greedy = all(_plainly_greedy(scheduled) and not _shows_logprobs(scheduled) for scheduled, _ in batch)
        wanted = [rows[-1:] if greedy else rows[-1 - len(scheduled.draft) :] for scheduled, rows in batch]
        if not wanted or (not greedy and all(rows.device.type == "cpu" for rows in wanted)):
            return Arriving(batch)
        try:
            together = torch.cat(wanted)
            values, arrived = _on_host(likeliest_ids(together) if greedy else together, wait)
        except Exception:
            logger.exception("logits of %d sequences could not be brought together; each is alone", len(batch))
            return Arriving(batch)
        return Arriving(batch, values if greedy else None, None if greedy else values, arrived)

    def finish(self, arriving: Arriving) -> None:
        """Sample the next tokens, once there is what they are sampled from."""
        batch, known = self._arrived(arriving)
        until = time.monotonic() + MASKS_SECONDS
        for scheduled, rows in batch:
            sequence = scheduled.sequence
            if sequence.phase is not SequencePhase.RUNNING:
                continue  # another sequence of the request failed in this step
            self._try(sequence.request, partial(self._sample_one, scheduled, rows, known.get(sequence.order), until))
        self._conclude_chosen(until)

    def finish_late(self) -> list[Sequence]:
        """Sample what was `late` and is not any more; return those sequences."""
        waiting, self.late = self.late, []
        until = time.monotonic() + MASKS_SECONDS
        landed = []
        for scheduled, rows in waiting:
            sequence = scheduled.sequence
            if sequence.phase is SequencePhase.RUNNING and not sequence.grammar_state.ready:
                self.late.append((scheduled, rows))
                continue
            landed.append(sequence)
            if sequence.phase is SequencePhase.RUNNING:
                self._try(sequence.request, partial(self._sample_one, scheduled, rows, None, until))
        self._conclude_chosen(until)
        return landed

    def _conclude_chosen(self, until: float) -> None:
        """Go on with tokens whose grammars were told, all of them before the first answer is waited for."""
        chosen, self._chosen = self._chosen, []
        for scheduled, row, token in chosen:
            if scheduled.sequence.phase is SequencePhase.RUNNING:
                self._try(scheduled.sequence.request, partial(self._conclude, scheduled, row, token, until))

    def wait_for_late(self, seconds: float) -> None:
        """Wait until a mask of what is `late` may have come, or the time is over."""
        wait_for([scheduled.sequence.grammar_state for scheduled, _ in self.late], seconds)

    def _try(self, request: Request, part: Callable[[], None]) -> None:
        """Do a part of a request's sampling; what is raised fails the request."""
        try:
            part()
        except ServeError as error:
            self._fail(request, str(error))
        except Exception as error:
            logger.exception("request %s failed while its token was sampled", request.request_id)
            self._fail(request, f"sampling a token failed: {type(error).__name__}")

    def _arrived(self, arriving: Arriving) -> tuple[Seq[tuple[ScheduledTokens, torch.Tensor]], dict[int, int | None]]:
        """The batch with the rows that are sampled from, and greedy tokens by the order of their sequences."""
        batch = arriving.batch
        try:
            if arriving.arrived is not None:
                arriving.arrived.synchronize()
            if arriving.rows is not None:
                sizes = [1 + len(scheduled.draft) for scheduled, _ in batch]
                split = arriving.rows.split(sizes)
                batch = [(scheduled, rows) for (scheduled, _), rows in zip(batch, split, strict=True)]
            greedy = [(scheduled, rows[-1:]) for scheduled, rows in batch if _plainly_greedy(scheduled)]
            ids = arriving.greedy
            if ids is None and greedy:
                ids = likeliest_ids(torch.cat([row for _, row in greedy]))
            tokens = [] if ids is None else _tokens_of(ids)
        except Exception:
            logger.exception("tokens of %d sequences could not be chosen together; each is alone", len(batch))
            return batch, {}
        return batch, {scheduled.sequence.order: token for (scheduled, _), token in zip(greedy, tokens, strict=True)}

    def _sample_one(
        self, scheduled: ScheduledTokens, rows: torch.Tensor | None, greedy: int | None, until: float
    ) -> None:
        sequence = scheduled.sequence
        if sequence.grammar_state is not None:
            if rows is not None and not sequence.grammar_state.ready_soon(until):
                self.late.append((scheduled, rows[-1 - len(scheduled.draft) :].clone()))
                return
            sequence.grammar_state.check()
            if sequence.grammar_state.complete and sequence.output:
                self._send(sequence, sequence.stream.finish("stop"))
                return
        if sequence.params.max_tokens == 0 or rows is None:
            self._send(sequence, sequence.stream.finish("length"))
        elif greedy is not None:
            self._append(scheduled, rows[-1], greedy, until)
        elif sequence.grammar_state is not None and not scheduled.draft:
            token = choose(sequence, rows[-1])
            self._add(sequence, token)
            self._chosen.append((scheduled, rows[-1], token))
        else:
            self._verify(scheduled, rows[-1 - len(scheduled.draft) :], until)

    def _verify(self, scheduled: ScheduledTokens, rows: torch.Tensor, until: float) -> None:
        """Sample token after token while each equals the drafted one, and one more.

        Every token is sampled from the logits, and with the random number, that it would have had without a draft:
        drafts change how fast tokens come, never which.
        """
        sequence = scheduled.sequence
        self.counts.drafted += len(scheduled.draft)
        for row, proposed in zip(rows, (*scheduled.draft, None), strict=True):
            token = choose(sequence, row)
            self._append(scheduled, row, token, until)
            if token != proposed or sequence.phase is not SequencePhase.RUNNING:
                return
            sequence.computed += 1
            self.counts.accepted += 1

    def _append(self, scheduled: ScheduledTokens, row: torch.Tensor, token: int, until: float) -> None:
        self._add(scheduled.sequence, token)
        self._conclude(scheduled, row, token, until)

    def _add(self, sequence: Sequence, token: int) -> None:
        sequence.output.append(token)
        if sequence.grammar_state is not None and token not in sequence.ends:
            sequence.grammar_state.advance(token)

    def _conclude(self, scheduled: ScheduledTokens, row: torch.Tensor, token: int, until: float) -> None:
        """Count and send a token that was added, and end the sequence if it is the last one."""
        sequence = scheduled.sequence
        known = True
        if sequence.grammar_state is not None and token not in sequence.ends:
            known = sequence.grammar_state.ready_soon(until)
        if sequence.reasoning_state is not None:
            sequence.reasoning_state.advance(sequence.output)
        self._count(sequence)
        wanted = sequence.params.logprobs
        logprob = None if wanted is None else logprob_of(row, token, wanted)
        delta: Delta | None = sequence.stream.take(token, logprob, at_limit=known)
        if delta is not None:
            self._send(sequence, delta)
        if not known and sequence.phase is SequencePhase.RUNNING and sequence.stream.at_limit:
            self.late.append((scheduled, None))

    def _count(self, sequence: Sequence) -> None:
        now = time.monotonic()
        request = sequence.request
        self.counts.generated += 1
        self._observer.tokens(0, 1)
        if request.first_token_at is None:
            request.first_token_at = now
            self._observer.first_token(now - request.arrived)
        if sequence.last_token_at is not None:
            self._observer.next_token(now - sequence.last_token_at)
        sequence.last_token_at = now


def _plainly_greedy(scheduled: ScheduledTokens) -> bool:
    params = scheduled.sequence.params
    return params.greedy and not params.adjusts_logits and not scheduled.draft and params.max_tokens > 0


def _shows_logprobs(scheduled: ScheduledTokens) -> bool:
    return scheduled.sequence.params.logprobs is not None


def _on_host(tensor: torch.Tensor, wait: bool) -> tuple[torch.Tensor, Event | None]:
    """A tensor on the host, and when it is there; None: already."""
    if wait or tensor.device.type == HOST or not has_streams(tensor.device):
        return tensor.cpu(), None
    return tensor.to("cpu", non_blocking=True), compute_mark(tensor.device)


# --- one token ----------------------------------------------------------------------------------------


def likeliest(logits: torch.Tensor) -> list[int | None]:
    """The likeliest token of each row of ``logits`` [rows, vocabulary], the lowest id among equals; None for NaN."""
    return _tokens_of(likeliest_ids(logits))


def _tokens_of(ids: torch.Tensor) -> list[int | None]:
    return [None if token < 0 else token for token in ids.tolist()]


def likeliest_ids(logits: torch.Tensor) -> torch.Tensor:
    """As `likeliest`, on the device of ``logits``; -1 for NaN."""
    tokens = logits.argmax(dim=-1)
    # argmax treats NaN as the largest value.
    broken = logits.gather(-1, tokens[:, None])[:, 0].isnan()
    return tokens.masked_fill(broken, -1)


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """Sample the next token of ``sequence`` from ``logits`` [vocabulary].

    Raises NotNumbersError when the logits are NaN.
    """
    params = sequence.params
    forced: int | None = None if sequence.reasoning_state is None else sequence.reasoning_state.forced
    if forced is not None:
        return forced
    scores = logits.float()
    if params.adjusts_logits:
        scores = adjust(sequence, scores.clone())
    token = likeliest(scores[None])[0] if params.greedy else _draw(sequence, scores)
    if token is None:
        raise NotNumbersError
    return token


def adjust(sequence: Sequence, scores: torch.Tensor) -> torch.Tensor:
    """Apply penalties, bias and grammar to ``scores`` [vocabulary] in place."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.request.prompt) | set(sequence.output)), device=scores.device)
        held = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(held > 0, held / factor, held * factor)
    if sequence.output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(sequence.output)
        ids = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor([float(n) for n in counts.values()], device=scores.device)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device)
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=scores.device)
        scores = torch.full_like(scores, -torch.inf).index_copy(0, allowed, scores[allowed])
    if len(sequence.output) < params.min_tokens and sequence.ends:
        scores[torch.tensor(sorted(sequence.ends), device=scores.device)] = -torch.inf
    if sequence.grammar_state is not None:
        sequence.grammar_state.mask(scores)
    return scores


def logprob_of(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """The natural-log probability of ``token_id`` under ``logits`` [vocabulary], and of the ``top`` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(logprobs, min(top, logprobs.numel()))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), pairs)


def _draw(sequence: Sequence, scores: torch.Tensor) -> int | None:
    params = sequence.params
    uniform = sequence.rng.random()
    probabilities = torch.softmax(scores.double() / max(params.temperature, _COLDEST), dim=-1)
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    if params.top_k <= 0 and params.top_p >= 1.0:
        return _invert(probabilities, uniform)
    ordered, ids = _kept(probabilities, params.top_k, params.top_p)
    index = _invert(ordered, uniform)
    return None if index is None else int(ids[index])


def _kept(probabilities: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the tokens that top_k and top_p keep, likeliest first."""
    size = probabilities.numel()
    count = min(top_k, size) if top_k > 0 else min(_FEW, size)
    ordered, ids = _likeliest_first(probabilities, count)
    whole = ordered.sum() if top_k > 0 else probabilities.sum()
    reached = ordered.cumsum(-1)
    while top_k <= 0 and count < size and reached[-1] < top_p * whole:
        count = min(size, 8 * count)
        ordered, ids = _likeliest_first(probabilities, count)
        reached = ordered.cumsum(-1)
    if top_p < 1.0:
        # A token stays while those before it have not reached top_p; the first always stays.
        kept = 1 + int((reached[:-1] < top_p * whole).sum())
        ordered, ids = ordered[:kept], ids[:kept]
    return ordered, ids


def _likeliest_first(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest, in order; equally likely ones in the order of their ids.

    Equals a stable sort of the whole vocabulary, without sorting all of it.
    """
    ids = None
    if 4 * count < probabilities.numel():
        least = torch.topk(probabilities, count, sorted=False).values.min()
        ids = ((probabilities >= least) & (probabilities > 0.0)).nonzero()[:, 0]
    ordered, order = torch.sort(probabilities if ids is None else probabilities[ids], descending=True, stable=True)
    return ordered[:count], (order if ids is None else ids[order])[:count]


def _invert(probabilities: torch.Tensor, uniform: float) -> int | None:
    """The index at which the cumulative sum passes ``uniform`` of the total; None where the total is 0 or NaN."""
    total = probabilities.cumsum(-1)
    if not total[-1] > 0.0:
        return None
    index = int(torch.searchsorted(total, total[-1:] * uniform, right=True))
    # Rounding may place the target past the end: take the last token with any probability.
    last = int(probabilities.nonzero()[-1])
    return min(index, last)
