"""A plan as JSON and back. Devices are kept in lists, so that 0 and "0" stay apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...errors import PlanError
from .plan import DevicePlan, Part, Plan, Prediction

FORMAT = 1


def dump(plan: Plan, indent: int | None) -> str:
    """Return `plan` as JSON text."""
    prediction = None
    if plan.prediction is not None:
        prediction = {
            **asdict(plan.prediction),
            "seconds_saved_per_gib": [list(item) for item in plan.prediction.seconds_saved_per_gib.items()],
        }
    content = {
        **{name: value for name, value in vars(plan).items() if name not in ("devices", "parts", "prediction")},
        "format": FORMAT,
        "devices": [{**asdict(device), "total": device.total} for device in plan.devices.values()],
        "parts": [asdict(part) for part in plan.parts],
        "prediction": prediction,
    }
    return json.dumps(content, indent=indent)


def load(text: str) -> Plan:
    """Return the plan in JSON text; PlanError if it is none."""
    try:
        content: dict[str, Any] = json.loads(text)
        if content.pop("format") != FORMAT:
            raise PlanError(f"this is a plan of another format; this version reads format {FORMAT}")
        devices = TypeAdapter(list[DevicePlan]).validate_python(
            [{k: v for k, v in device.items() if k != "total"} for device in content.pop("devices")]
        )
        parts = TypeAdapter(tuple[Part, ...]).validate_python(content.pop("parts"))
        prediction = content.pop("prediction")
        if prediction is not None:
            prediction["seconds_saved_per_gib"] = dict(map(tuple, prediction["seconds_saved_per_gib"]))
            prediction = TypeAdapter(Prediction).validate_python(prediction)
        content["notes"] = tuple(content["notes"])
        by_key = {device.device: device for device in devices}
        return TypeAdapter(Plan).validate_python(
            {**content, "devices": by_key, "parts": parts, "prediction": prediction}
        )
    except (ValidationError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"this is not a plan: {error}") from None
