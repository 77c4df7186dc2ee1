"""The second half of a step: from logits to the next tokens of each sequence, and to what is told of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.observer import Observer
from bigmodel.server.engine.request import Delta, Phase, Request, Sequence
from bigmodel.server.engine.sampler import choose, likeliest, logprob_of
from bigmodel.server.engine.scheduler import Grant

logger = logging.getLogger(__name__)


@dataclass
class TokenCounts:
    """Tokens so far: chosen, guessed by a draft model, and guessed right."""

    generated: int = 0
    drafted: int = 0
    accepted: int = 0


class NextTokens:
    """Chooses the tokens that follow the sequences of a step.

    ``send`` is given the new text of a sequence, ``fail`` a request for which no token can be chosen, and why.
    """

    def __init__(
        self, observer: Observer, send: Callable[[Sequence, Delta], None], fail: Callable[[Request, str], None]
    ) -> None:
        self.counts = TokenCounts()
        self._observer = observer
        self._send = send
        self._fail = fail

    def choose(self, ready: Seq[tuple[Grant, torch.Tensor]]) -> None:
        """Choose for each grant from its logits [tokens, vocabulary], the plainly greedy ones in one operation.

        A failure concerns its own request only (a grammar that cannot go on, logits that are not numbers).
        """
        plain = [(grant.sequence.order, rows[-1]) for grant, rows in ready if _plainly_greedy(grant)]
        tokens = likeliest(torch.stack([row for _, row in plain])) if plain else []
        greedy = {order: token for (order, _), token in zip(plain, tokens, strict=True)}
        for grant, rows in ready:
            request = grant.sequence.request
            try:
                self._choose_one(grant, rows, greedy.get(grant.sequence.order))
            except ServeError as error:
                self._fail(request, str(error))
            except Exception as error:
                logger.exception("request %s failed while its token was chosen", request.request_id)
                self._fail(request, f"choosing a token failed: {type(error).__name__}")

    def _choose_one(self, grant: Grant, rows: torch.Tensor, greedy: int | None) -> None:
        sequence = grant.sequence
        if sequence.params.max_tokens == 0:
            self._send(sequence, sequence.text.finish("length"))
        elif greedy is not None:
            self._advance(sequence, rows[-1], greedy)
        else:
            self._check_draft(sequence, rows[-1 - len(grant.draft) :], grant.draft)

    def _check_draft(self, sequence: Sequence, rows: torch.Tensor, draft: tuple[int, ...]) -> None:
        """Choose token after token as long as each is the one that was guessed, and one more.

        Every token is chosen from the logits, and with the random number, that it would have been chosen
        with had nothing been guessed: guessing changes how fast tokens come, never which.
        """
        self.counts.drafted += len(draft)
        for row, guess in zip(rows, (*draft, None), strict=True):
            token = choose(sequence, row)
            self._advance(sequence, row, token)
            if token != guess or sequence.phase is not Phase.RUNNING:
                return
            sequence.computed += 1
            self.counts.accepted += 1

    def _advance(self, sequence: Sequence, row: torch.Tensor, token: int) -> None:
        if sequence.phase is not Phase.RUNNING:
            return  # another choice of the request failed in this very step
        sequence.output.append(token)
        if sequence.grammar_state is not None:
            sequence.grammar_state.advance(token)
        self._count(sequence)
        wanted = sequence.params.logprobs
        logprob = None if wanted is None else logprob_of(row, token, wanted)
        delta: Delta | None = sequence.text.take(token, logprob)
        if delta is not None:
            self._send(sequence, delta)

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


def _plainly_greedy(grant: Grant) -> bool:
    params = grant.sequence.params
    return params.greedy and not params.adjusts_logits and not grant.draft and params.max_tokens > 0
