"""Training curves: that of one process, and those of two with every strategy, which are compared with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.shared import Once
from tests.train.multiprocess import run_on_ranks

from .curve import Model, run, run_strategy

TOLERANCE = 1e-6
DEEPSPEED = ("deepspeed", "transformers.integrations.deepspeed", "torch._inductor.compile_fx")
"""What DeepSpeed's engine imports."""


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "curve.json").read_text())
    with safe_open(folder / "exported" / "model.safetensors", "pt") as exported:
        found["exported"] = sorted(exported.keys())
    return found


def alone(folder: Path) -> dict[str, Any]:
    """The curve of one process."""
    run(folder)
    return read(folder)


@pytest.fixture
def check_curve(once: Once, tmp_path: Path) -> Callable[[str], None]:
    """Hold the curve of two processes with a strategy against that of one, and its resumption against itself."""

    def check(name: str) -> None:
        run_on_ranks(run_strategy, tmp_path, name, modules=DEEPSPEED if name.startswith("zero") else ())
        expected, found = once("curve", alone), read(tmp_path)
        for step, ((loss, norm), (expected_loss, expected_norm)) in enumerate(
            zip(found["losses"], expected["losses"], strict=True)
        ):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE), f"loss of step {step}"
            assert norm == pytest.approx(expected_norm, rel=TOLERANCE), f"gradient norm of step {step}"
        assert found["resumed"] == found["rest"]
        assert found["exported"] == sorted(Model().state_dict())

    return check
