"""States of the training side begin anew in each test here."""

from __future__ import annotations

from tests.train.new_states import new_states

__all__ = ["new_states"]
