"""Validation of arguments: a mistake raises one clear error at the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from torch import nn

from .errors import PlanError

LARGEST = 2**31 - 1
"""Upper bound of counts of sequences, tokens, slots and ranks: a product of two must fit in 64 bits."""


def check_model(model: object) -> None:
    """Refuse a model that is not a module.

    Raises:
        PlanError: the message names its type.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {shown(model)}; give a torch.nn.Module")


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Return `value`, an argument called `name`, as an int.

    Raises:
        PlanError: it is not a whole number from `least` to `LARGEST`.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= LARGEST:
        return int(value)
    raise PlanError(f"{name} is {shown(value)}; give a whole number from {least} to {LARGEST}")


def optional_whole_number(name: str, value: object, least: int = 0) -> int | None:
    """Return None for None, otherwise the result of `whole_number`."""
    return None if value is None else whole_number(name, value, least)


def share(name: str, value: object) -> float:
    """Return `value`, an argument called `name`, as a float.

    Raises:
        PlanError: it is not a number from 0 to 1.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1:
        return float(value)
    raise PlanError(f"{name} is {shown(value)}; give a number from 0 to 1")


def check_flags(**flags: object) -> None:
    """Refuse flags that are neither true nor false.

    Raises:
        PlanError: the message names the flag.
    """
    for name, value in flags.items():
        if value is not None and not (isinstance(value, Integral) and int(value) in (0, 1)):
            raise PlanError(f"{name} is {shown(value)}; give True or False")


def check_choice(name: str, value: object, known: Iterable[str | None]) -> None:
    """Refuse a value that is not in `known`.

    Raises:
        PlanError: the message lists the known values.
    """
    choices = list(known)
    if not isinstance(value, (str, type(None))) or value not in choices:
        raise PlanError(f"{name} is {shown(value)}; use one of {', '.join(map(str, choices))}")


def check_names(name: str, given: object) -> None:
    """Refuse an argument, called `name`, that is not a mapping with string keys.

    Raises:
        PlanError: the message names its type.
    """
    if not isinstance(given, Mapping):
        raise PlanError(f"{name} is {shown(given)}; give a mapping by name")
    for key in given:
        if not isinstance(key, str):
            raise PlanError(f"{name} has the key {shown(key)}; keys are names of modules or tensors")


def shown(value: object) -> str:
    """Return a short description of a value for messages: its repr if that is short, otherwise its type."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number beyond 64 bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}..."
    return f"a {type(value).__name__}"
