"""A machine profile as JSON and back."""

from __future__ import annotations

import json
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from ..errors import PlanError
from .machine import MachineProfile

FORMAT = 2


def dump(machine: MachineProfile) -> str:
    """Return `machine` as JSON text."""
    return json.dumps({"format": FORMAT, "machine": asdict(machine)}, indent=1) + "\n"


def load(text: str) -> MachineProfile:
    """Return the machine profile in JSON text.

    Raises:
        PlanError: the text is none.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise PlanError(f"this machine profile has format {content['format']}; this version reads {FORMAT}")
        return TypeAdapter(MachineProfile).validate_python(content["machine"])
    except (ValidationError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(f"this is not a machine profile: {error}") from None
