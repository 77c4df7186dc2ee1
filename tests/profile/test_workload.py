from __future__ import annotations

import pytest

from bigmodel.errors import PlanError
from bigmodel.profile import Workload


def test_the_prompt_is_what_is_not_generated() -> None:
    assert Workload(context_length=100, new_tokens=30).prompt_length == 70


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("batch_size", {"batch_size": 0, "context_length": 4}),
        ("context_length", {"context_length": -1}),
        ("new_tokens", {"context_length": 4, "new_tokens": 5}),
        ("cache", {"context_length": 4, "cache": "paged"}),
    ],
)
def test_shapes_that_make_no_sense_are_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=field):
        Workload(**settings)  # type: ignore[arg-type]
