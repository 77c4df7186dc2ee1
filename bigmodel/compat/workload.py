"""Workload that models of other libraries are planned for: environment variables, inherited by child processes."""

from __future__ import annotations

import os

from ..errors import PlanError

BATCH_SIZE = "BIGMODEL_BATCH_SIZE"
CONTEXT_LENGTH = "BIGMODEL_CONTEXT_LENGTH"


def set_workload(batch_size: int | None = None, context_length: int | None = None) -> None:
    """Have models planned for these sizes from now on; None leaves what the environment says.

    Args:
        batch_size: Sequences of a batch.
        context_length: Tokens of a sequence at its end.
    """
    for variable, value in ((BATCH_SIZE, batch_size), (CONTEXT_LENGTH, context_length)):
        if value is not None:
            os.environ[variable] = str(value)


def workload() -> tuple[int, int | None]:
    """Return the sequences of a batch (1 by default), and the tokens of each; None: the planner's default.

    Raises:
        PlanError: A variable is no positive whole number; the message names it.
    """
    return _number(BATCH_SIZE) or 1, _number(CONTEXT_LENGTH)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PlanError(f"{variable} is {text!r}; set it to a whole number from 1, or unset it")
    return int(text)
