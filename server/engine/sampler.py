"""From logits to a token, one sequence at a time, by its own parameters and its own random numbers."""

from __future__ import annotations

from collections import Counter

import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.request import Sequence, TokenLogprob

_FEW = 256  # tokens among which top_p usually ends
_COLDEST = 1e-30  # a temperature at which only the likeliest token is left; below, a division may overflow


class NotNumbersError(ServeError):
    """The model's logits are not numbers, so that no token can be chosen by them."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers; its data type may be too narrow for it")


def likeliest(logits: torch.Tensor) -> list[int | None]:
    """The likeliest token of each row of ``logits`` [rows, vocabulary], the lowest id among equals.

    None for a row that holds what is not a number.
    """
    tokens = logits.argmax(dim=-1)
    # What is not a number counts as the largest: where the largest is one, all are.
    broken = logits.gather(-1, tokens[:, None])[:, 0].isnan()
    return [None if token < 0 else token for token in tokens.masked_fill(broken, -1).tolist()]


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The next token of ``sequence`` from ``logits`` [vocabulary], adjusted, filtered and drawn as it asks.

    Raises NotNumbersError when the logits are no numbers.
    """
    params = sequence.params
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
    if sequence.grammar_state is not None:
        sequence.grammar_state.mask(scores)
    return scores


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
    ordered, ids = _first(probabilities, count)
    whole = ordered.sum() if top_k > 0 else probabilities.sum()
    reached = ordered.cumsum(-1)
    while top_k <= 0 and count < size and reached[-1] < top_p * whole:
        count = min(size, 8 * count)
        ordered, ids = _first(probabilities, count)
        reached = ordered.cumsum(-1)
    if top_p < 1.0:
        # A token stays while those before it have not reached top_p; the first always stays.
        kept = 1 + int((reached[:-1] < top_p * whole).sum())
        ordered, ids = ordered[:kept], ids[:kept]
    return ordered, ids


def _first(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest, in order; equally likely ones in the order of their ids.

    What a stable sort of all would give, without sorting a whole vocabulary.
    """
    ids = None
    if 4 * count < probabilities.numel():
        least = torch.topk(probabilities, count, sorted=False).values.min()
        ids = ((probabilities >= least) & (probabilities > 0.0)).nonzero()[:, 0]
    ordered, order = torch.sort(probabilities if ids is None else probabilities[ids], descending=True, stable=True)
    return ordered[:count], (order if ids is None else ids[order])[:count]


def _invert(probabilities: torch.Tensor, uniform: float) -> int | None:
    """The index at which the running sum passes ``uniform`` of the whole; None where there is no sum."""
    total = probabilities.cumsum(-1)
    if not total[-1] > 0.0:
        return None
    index = int(torch.searchsorted(total, total[-1:] * uniform, right=True))
    # Rounding can leave the target at the very end: take the last token that has any probability.
    last = int(probabilities.nonzero()[-1])
    return min(index, last)


def logprob_of(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """The natural-log probability of ``token_id`` under ``logits`` [vocabulary], and of the ``top`` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(logprobs, min(top, logprobs.numel()))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), pairs)
