"""Whether code reads attributes by names that it makes as it runs: ``getattr(self, f"weight_{index}")``."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CodeType

_BY_NAME = frozenset(("attrgetter", "__getattribute__"))
"""Functions beside ``getattr`` that read attributes by name; their arguments are not analysed."""


def computes_names(code: CodeType) -> bool:
    """Return whether a function's code, or that of a function within it, may read an attribute by a computed name.

    ``getattr`` passed on as an argument, as to ``functools.reduce``, counts.
    """
    if not _BY_NAME.isdisjoint(code.co_names):
        return True
    if "getattr" in code.co_names:
        steps = list(dis.get_instructions(code))
        loads = [place for place, step in enumerate(steps) if step.argval == "getattr" and step.opname != "LOAD_CONST"]
        if not all(_names_constant(steps[place + 1 :]) for place in loads):
            return True
    return any(computes_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def _names_constant(steps: Sequence[dis.Instruction]) -> bool:
    """Whether the instructions after a load of ``getattr`` call it with a constant as its second argument.

    The stack is followed along the instructions in their order. Where code branches on its way to the call this tells
    nothing, and the name counts as computed.
    """
    depth, found = 0, False  # arguments on the stack; whether the second of them is a constant
    for step in steps:
        if step.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and depth == step.arg:
            return found
        before = depth
        depth += 0 if step.opname == "PUSH_NULL" else dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 0:
            return False
        if depth <= 2 and step.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            found = before == 1 and depth == 2 and step.opname == "LOAD_CONST" and isinstance(step.argval, str)
    return False
