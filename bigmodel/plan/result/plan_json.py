"""A plan as JSON and back. What goes by device is kept in lists, so that 0 and "0" stay apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...errors import PlanError
from .budgets import Key
from .plan import DevicePlan, Part, Plan, Prediction

FORMAT = 2
"""Raised whenever a field comes or goes: a plan without one of them could not be obeyed."""


def dump(plan: Plan, indent: int | None) -> str:
    """Return `plan` as JSON text."""
    prediction = None
    if plan.prediction is not None:
        saved = _pairs(plan.prediction.seconds_saved_per_gib)
        prediction = {**asdict(plan.prediction), "seconds_saved_per_gib": saved}
    content = {
        **vars(plan),
        "format": FORMAT,
        "expert_cache": _pairs(plan.expert_cache),
        "devices": [{**asdict(device), "total": device.total} for device in plan.devices.values()],
        "parts": [asdict(part) for part in plan.parts],
        "prediction": prediction,
    }
    return json.dumps(content, indent=indent)


def load(text: str) -> Plan:
    """Return the plan in JSON text; PlanError if it is none."""
    try:
        content: dict[str, Any] = json.loads(text)
        written = content.pop("format")
        if written != FORMAT:
            raise PlanError(f"this is a plan of format {written}, and this version reads format {FORMAT}: make it anew")
        devices = TypeAdapter(list[DevicePlan]).validate_python(
            [{k: v for k, v in device.items() if k != "total"} for device in content.pop("devices")]
        )
        parts = TypeAdapter(tuple[Part, ...]).validate_python(content.pop("parts"))
        prediction = content.pop("prediction")
        if prediction is not None:
            prediction["seconds_saved_per_gib"] = dict(map(tuple, prediction["seconds_saved_per_gib"]))
            prediction = TypeAdapter(Prediction).validate_python(prediction)
        content["notes"] = tuple(content["notes"])
        content["expert_cache"] = dict(map(tuple, content["expert_cache"]))
        by_key = {device.device: device for device in devices}
        return TypeAdapter(Plan).validate_python(
            {**content, "devices": by_key, "parts": parts, "prediction": prediction}
        )
    except (ValidationError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"this is not a plan: {error}") from None


def _pairs(by_device: Mapping[Key, object]) -> list[list[object]]:
    return [list(item) for item in by_device.items()]
