"""Record of the stand-in in this process: changes in other libraries, plans used, fallbacks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """Content of the report.

    Attributes:
        seams: For each change in another library, by its name, whether it is in place, else why not.
        plans: What was loaded, and the plan that it was dispatched by.
        fallbacks: What was left to the other library, and why.
    """

    seams: dict[str, str] = field(default_factory=dict)
    plans: list[tuple[str, str]] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)


RECORD = Record()
"""The record of this process."""
