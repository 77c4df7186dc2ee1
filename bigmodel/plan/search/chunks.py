"""The chunks in which prompts are run, where the activations of a whole prompt leave an accelerator too little memory.

Each chunk is a forward of its own: streamed weights are fetched for each, so larger ones are faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...errors import BudgetError
from ..result.budgets import is_accelerator
from ..result.plan import Plan

PREFILL_CHUNKS = (8192, 2048, 512)
"""Sizes that are tried, in tokens."""


def with_chunks(plan_of: Callable[[int | None], Plan], accelerators: bool) -> Plan:
    """Return the plan of whole prompts if accelerators run all layers of the model, else that of the largest chunks
    with which they run the most.

    Args:
        plan_of: returns the plan of a chunk size; None: of whole prompts. It raises BudgetError if nothing fits.
        accelerators: whether there are any.

    Raises:
        BudgetError: nothing fits with any size; the message is that for whole prompts.
    """
    best: Plan | None = None
    refused: BudgetError | None = None
    for size in (None, *PREFILL_CHUNKS):
        if best is not None and size is not None and size >= best.prompt_length:
            continue
        try:
            found = plan_of(size)
        except BudgetError as error:
            refused = refused or error
            continue
        if best is None or _there(found) > _there(best):
            best = found
        if not accelerators or _there(best) == 1:
            break
        if size is not None and found.prefill_chunk_size is None:
            break  # this model runs no prompt in chunks
    if best is None:
        assert refused is not None
        raise refused
    return best


def _there(plan: Plan) -> float:
    """Return the share of a model's layers that run on accelerators: of the parts of the class that has most bytes."""
    by_class: Counter[str] = Counter()
    for part in plan.parts:
        by_class[part.kind] += part.bytes
    ((most, _),) = by_class.most_common(1)
    layers = [part for part in plan.parts if part.kind == most]
    return sum(is_accelerator(part.runs_on) for part in layers) / len(layers)
