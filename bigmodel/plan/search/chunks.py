"""The chunks in which prompts are run, where the activations of a whole prompt leave an accelerator too little memory.

Each chunk is a forward of its own: streamed weights are fetched for each, so larger ones are faster.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import BudgetError
from ..result.budgets import is_accelerator
from ..result.plan import Plan

PREFILL_CHUNKS = (8192, 4096, 2048, 1024, 512, 256, 128)
"""Sizes that are tried, in tokens."""


def with_chunks(plan_of: Callable[[int | None], Plan], accelerators: bool) -> Plan:
    """Return the plan of whole prompts if accelerators run all of the model, else that of the largest chunks with which
    they run most of it.

    Args:
        plan_of: returns the plan of a chunk size; None: of whole prompts. It raises BudgetError if nothing fits.
        accelerators: whether there are any.

    Raises:
        BudgetError: nothing fits with any size; the message is that for whole prompts.
    """
    best: Plan | None = None
    refused: BudgetError | None = None
    for size in (None, *PREFILL_CHUNKS):
        try:
            found = plan_of(size)
        except BudgetError as error:
            refused = refused or error
            continue
        if size is not None and found.prefill_chunk_size is None and best is not None:
            continue  # the prompt is no longer than a chunk
        if best is None or _run_there(found) > _run_there(best):
            best = found
        if not accelerators or _run_there(best) == len(best.parts):
            return best
    if best is None:
        assert refused is not None
        raise refused
    return best


def _run_there(plan: Plan) -> int:
    """Return how many parts run on accelerators."""
    return sum(is_accelerator(part.runs_on) for part in plan.parts)
