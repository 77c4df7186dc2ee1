"""What runs of the zoo keep, and take up again."""

from __future__ import annotations

from pathlib import Path

from .placements import Examined
from .table import keep, problems_kept


def test_what_a_run_kept_is_known_to_the_next(tmp_path: Path) -> None:
    folder = str(tmp_path)
    right = Examined(planned={0: 100}, measured={0: 95}, budgets={0: 120})
    wrong = Examined(planned={0: 100}, measured={0: 110}, budgets={0: 120})
    keep(folder, "llama", "float32", {"disk": right, "RAM": right})
    keep(folder, "llama", "bfloat16", {"disk": right, "RAM": wrong})
    keep(folder, "bark", "float32", "runs no call of its conventions")
    assert problems_kept(folder, "llama", "float32") == {}
    assert problems_kept(folder, "llama", "bfloat16") == {"RAM": wrong.problems}
    assert problems_kept(folder, "bark", "float32") == "runs no call of its conventions"


def test_what_no_run_kept_is_not_known(tmp_path: Path) -> None:
    keep(None, "llama", "float32", "skipped")
    assert problems_kept(None, "llama", "float32") is None
    assert problems_kept(str(tmp_path), "llama", "float32") is None
