"""The sections carry accelerate's names and variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigmodel.launch.options import options_of
from bigmodel.launch.settings import SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_has_a_help_line_and_no_default(section: str) -> None:
    options = options_of(SECTIONS[section])
    assert options
    values = SECTIONS[section]()
    assert all(getattr(values, name) is None for name in options)
    assert all(option.help.endswith(".") for option in options.values())


def test_the_variables_are_those_the_training_side_of_accelerate_reads() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate, whose variables are compared, is not installed")
    text = "".join(path.read_text() for path in Path(accelerate.__file__).parent.rglob("*.py"))
    known = set(re.findall(r"[A-Z0-9_]{4,}", text))
    for section in ("deepspeed_config", "fsdp_config"):
        for name, option in options_of(SECTIONS[section]).items():
            parts = (option.environment or "").split("_")
            assert option.environment is None or any("_".join(parts[n:]) in known for n in range(3)), name
