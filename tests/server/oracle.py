"""The slow, obvious twin of the engine: one request, one token, one whole forward at a time.

No cache, no batch, no shared code with the engine but the tokenizer: the whole text is computed anew for each
token by the model's own attention, and the token is chosen by plain Python from a list of logits.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from bigmodel.server.engine import SamplingParams


def generate(model: Any, tokenizer: Any, prompt: list[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """The tokens of one choice of a request (an end token, if drawn, is not among them)."""
    assert params.seed is not None or params.greedy
    rng = random.Random((params.seed or 0) * 1_000_003 + choice)
    output: list[int] = []
    while len(output) < params.max_tokens:
        token = choose(next_logits(model, prompt + output), prompt, output, params, rng)
        if token == tokenizer.eos_token_id and not params.ignore_eos:
            break
        output.append(token)
        if any(stop in tokenizer.decode(output) for stop in params.stop):
            break
    return output


def next_logits(model: Any, tokens: list[int]) -> list[float]:
    """Logits after ``tokens``."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return [float(x) for x in logits]


def choose(
    logits: list[float], prompt: list[int], output: list[int], params: SamplingParams, rng: random.Random
) -> int:
    """One token."""
    scores = list(logits)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.temperature == 0:
        return scores.index(max(scores))
    uniform = rng.random()
    best = max(scores)
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    ids = list(range(len(scores)))
    if params.min_p:
        floor = params.min_p * max(probabilities)
        probabilities = [p if p >= floor else 0.0 for p in probabilities]
    if params.top_k or params.top_p < 1:
        ids.sort(key=lambda token: -probabilities[token])
        kept = ids[: params.top_k or None]
        mass, reach = sum(probabilities[t] for t in kept) * params.top_p, 0.0
        ids = []
        for token in kept:
            if reach >= mass:
                break
            ids.append(token)
            reach += probabilities[token]
    target, reach = uniform * sum(probabilities[t] for t in ids), 0.0
    for token in ids:
        reach += probabilities[token]
        if reach > target:
            return token
    return ids[-1]
