"""FSDP2 on two CPU processes gives the loss curve of one, and goes on bitwise from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "fsdp_hybrid", "fsdp_one_file"])
def test_the_curve_is_that_of_one_process(name: str, check_curve: Callable[[str], None]) -> None:
    check_curve(name)
