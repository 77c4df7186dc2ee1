"""DeepSpeed on two CPU processes gives the loss curve of one, and goes on bitwise from its checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install bigmodel[deepspeed]"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero_0", "zero_1", "zero_2_offload", "zero_3", "zero_3_offload"])
def test_the_curve_is_that_of_one_process(name: str, check_curve: Callable[[str], None]) -> None:
    check_curve(name)
