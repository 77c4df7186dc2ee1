"""The report of what the stand-in has done in this process, as text."""

from __future__ import annotations

import sys

from .record import RECORD
from .seams import SEAMS
from .stand_in import VERSION, is_installed


def report() -> str:
    """Return the changes in other libraries, the plans that were used, and what fell back and why, as text."""
    if not is_installed():
        return "bigmodel does not stand in for accelerate in this process: nothing is changed"
    lines = [f"bigmodel stands in for accelerate ({VERSION})", "changes in other libraries:"]
    for seam in SEAMS:
        state = RECORD.seams.get(seam.name, "not imported" if seam.module not in sys.modules else "not in place")
        lines.append(f"  {seam.name}: {state}")
    lines.append("plans:" if RECORD.plans else "plans: none")
    lines += [f"  {what}: {plan}" for what, plan in RECORD.plans]
    lines.append("fallbacks:" if RECORD.fallbacks else "fallbacks: none")
    lines += [f"  {what}: {why}" for what, why in RECORD.fallbacks]
    return "\n".join(lines)
