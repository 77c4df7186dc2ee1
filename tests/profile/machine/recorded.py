"""The work of the models that calibrate a machine, recorded once for all machines and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.profile.machine import calibrate, probe_compute
from bigmodel.profile.trace.work import Work

_works_of = calibrate.works_of
_recorded: dict[object, list[tuple[Work, ...]]] = {}


def record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of equal sizes have the same work, whatever device they run on: recording it takes most of the time of
    calibrating."""
    for module in (calibrate, probe_compute):
        monkeypatch.setattr(module, "works_of", _recorded_works)


def _recorded_works(model: Any, batch_size: int, context: int, device: torch.device) -> list[tuple[Work, ...]]:
    key = (type(model), model.config.hidden_size, model.config.num_hidden_layers, batch_size, context)
    if key not in _recorded:
        _recorded[key] = _works_of(model, batch_size, context, device)
    return _recorded[key]
