"""The text side of one choice: its tokens become text, stop strings end it, events carry it away."""

from __future__ import annotations

from bigmodel.server.engine.request import Delta, Sequence, TokenLogprob
from bigmodel.server.text.codec import TextCodec
from bigmodel.server.text.detokenize import Detokenizer
from bigmodel.server.text.stop import StopChecker


class Choice:
    """Collects what one sequence generates and hands out deltas.

    Tokens whose text is held back (half a character, the possible beginning of a stop string) travel with
    the delta that shows it.
    """

    def __init__(self, sequence: Sequence, codec: TextCodec, eos_ids: frozenset[int], max_length: int) -> None:
        self._sequence = sequence
        self._eos_ids = frozenset() if sequence.params.ignore_eos else eos_ids
        self._limit = min(sequence.params.max_tokens, max_length - sequence.prompt_length)
        self._detokenizer = Detokenizer(codec, sequence.request.prompt)
        self._stop = StopChecker(sequence.params.stop)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def take(self, token_id: int, logprob: TokenLogprob | None) -> Delta | None:
        """Account for a token just chosen (already in ``sequence.output``); a delta if there is one to send."""
        if token_id in self._eos_ids:
            return self.finish("stop")
        self._tokens.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        text, stopped = self._stop.push(self._detokenizer.add(token_id))
        if stopped:
            return self._delta(text, "stop")
        state = self._sequence.grammar_state
        if state is not None and state.complete:
            return self.finish("stop", text)
        if len(self._sequence.output) >= self._limit:
            return self.finish("length", text)
        return self._delta(text, None) if text else None

    def finish(self, reason: str, text: str = "") -> Delta:
        """The last delta, with everything that was held back."""
        shown, stopped = self._stop.push(self._detokenizer.flush())
        text += shown
        if not stopped:
            text += self._stop.flush()
        return self._delta(text, "stop" if stopped else reason)

    def _delta(self, text: str, reason: str | None) -> Delta:
        delta = Delta(self._sequence.index, text, tuple(self._tokens), tuple(self._logprobs), finish_reason=reason)
        self._tokens, self._logprobs = [], []
        return delta
