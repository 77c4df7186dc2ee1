from __future__ import annotations

import pytest

from bigmodel.profile.machine.effort import QUICK, Effort


@pytest.mark.parametrize("effort", [Effort(), QUICK])
def test_sizes_ascend_as_curves_want_them(effort: Effort) -> None:
    for sizes in (effort.rows, effort.moved, effort.copied, [side for side, _ in effort.images]):
        assert list(sizes) == sorted(set(sizes))
    assert len(effort.copied) == 2


def test_the_two_models_are_one_of_many_small_matrices_and_one_of_few_large_ones() -> None:
    for effort in (Effort(), QUICK):
        (narrow, deep), (wide, shallow) = effort.models
        assert narrow < wide
        assert deep > shallow


def test_quick_is_less_of_everything() -> None:
    whole = Effort()
    for name in ("width", "spread", "at_least", "repeats", "file", "prompt"):
        assert getattr(QUICK, name) < getattr(whole, name)
