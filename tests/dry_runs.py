"""One dry run for equal models: tests that need a profile, and are not about profiles, share what was recorded.

A dry run takes a quarter of a second, and many tests of the rooms above profile the same tiny models at the same
shapes. Tests of `profile` run every one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.profile import profile
from bigmodel.profile.trace.dry_run import Phase, dry_run
from tests.equal_models import description, named_tensors

NOT_SHARED = "tests/profile"
MOST_KNOWN = 64
"""Dry runs that are kept, in the order in which they were last asked for."""

_known: dict[Hashable, list[Phase]] = {}


@pytest.fixture(autouse=True, scope="module")
def equal_models_share_dry_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share dry runs in this module, unless it is of the room that they are about."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.nodeid.startswith(NOT_SHARED):
            patch.setattr(profile, "dry_run", _shared)
        yield


def _shared(
    model: nn.Module,
    units: Sequence[Any],
    workload: Hashable,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    example: object,
    **options: Any,
) -> list[Phase]:
    described = None if example is not None else description(model)
    if described is None:
        return dry_run(model, units, workload, device, dtypes, example, **options)  # type: ignore[arg-type]
    cast = tuple((name, dtypes[id(tensor)]) for name, tensor in named_tensors(model).items() if id(tensor) in dtypes)
    key = (described, tuple(units), workload, device, cast, *options.items())
    found = _known.pop(key, None)
    if found is None:
        found = dry_run(model, units, workload, device, dtypes, None, **options)  # type: ignore[arg-type]
        if len(_known) >= MOST_KNOWN:
            del _known[next(iter(_known))]
    _known[key] = found
    return list(found)
