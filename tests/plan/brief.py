"""Plans that are searched for briefly, in modules of tests that need a plan and not the very best one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigmodel.plan.search import search

EXACT = search.EXACT
"""What the exact search is limited to elsewhere."""


@pytest.fixture(autouse=True, scope="module")
def plans_are_searched_briefly() -> Iterator[None]:
    """Leave out the exact search, which takes half a second or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EXACT", 0)
        yield
