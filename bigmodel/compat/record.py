"""What the stand-in has done in this process: changes in other libraries, plans used, and what it fell back to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass
class Record:
    """What is reported.

    Attributes:
        seams: For each change in another library, by its name, whether it is in place, else why not.
        plans: What was loaded, and the plan that it was dispatched by.
        fallbacks: What was left to the other library, and why.
    """

    seams: dict[str, str] = field(default_factory=dict)
    plans: list[tuple[str, str]] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)


RECORD = Record()
"""That of this process."""


def report() -> str:
    """Return the changes in other libraries, the plans that were used, and what fell back and why, as text."""
    from .seams import SEAMS
    from .stand_in import VERSION, is_installed

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
