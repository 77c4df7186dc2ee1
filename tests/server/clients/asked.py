"""What clients are asked for, and what the model that calls functions answers."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

SAID = "I look it up."
THOUGHT = "Which city?"
AFTER_TOOLS = ["It ", "rains."]
ANSWER = "".join(AFTER_TOOLS)
TOO_LONG = "x " * 1000  # more than the tiny model's context of 1024 tokens


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, pydantic.Field(ge=0, le=9)]


class NotedTrip(Trip):
    """A trip with a note. Some clients leave out the length where a schema is strict: a note may then be endless."""

    note: Annotated[str, pydantic.Field(max_length=5)]


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: Its name.
        days: How many days from now.
    """
    assert (city, days) == ("Paris", 3)
    return "rain"


def get_time() -> str:
    """The time."""
    return "noon"
