"""What torch.compile traces of a dispatched model: the modules' own forwards, and nothing of what brings their weights.

Dynamo skips the frames of the packages named here as it skips those of torch itself. Each attached module therefore
breaks the graph once, and its forward is compiled as a graph of its own, which modules of the same kind share.

On virtual accelerators ``backend="eager"`` runs what was traced; there is nothing for which others could make code.
"""

from __future__ import annotations

import functools

from torch._dynamo import trace_rules

UNTRACED = ("bigmodel.devices", "bigmodel.profile", "bigmodel.checkpoint", "bigmodel.dispatch")


@functools.cache
def leave_untraced() -> None:
    """Tell Dynamo, once, to leave the frames of `UNTRACED` as they are."""
    for package in UNTRACED:
        trace_rules.add(package)
