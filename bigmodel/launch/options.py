"""Options declared once, as dataclass fields, and read from configuration files, flags and environments alike."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import LaunchError

Kind = Literal["int", "float", "str", "bool"]

_TRUE = frozenset({"true", "yes", "y", "t", "on", "1"})
_FALSE = frozenset({"false", "no", "n", "f", "off", "0"})


@dataclass(frozen=True)
class Option:
    """One setting: its name (also its flag, and its key in a file), type, default and help text.

    Attributes:
        environment: the variable that carries it to the training processes, or None when none does.
        choices: the values allowed, compared without regard to case; empty when any value of the type is.
        switch: the flag takes no value (`--debug`); otherwise it takes one (`--fsdp_offload_params true`).
    """

    name: str
    kind: Kind
    default: Any
    help: str
    environment: str | None = None
    choices: tuple[str, ...] = ()
    switch: bool = False


def option(
    default: Any, help: str, *, env: str | None = None, choices: Iterable[str] = (), switch: bool = False
) -> Any:
    """A dataclass field that is an `Option`."""
    metadata = {"help": help, "env": env, "choices": tuple(choices), "switch": switch}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> dict[str, Option]:
    """Every option declared on the dataclass `cls`, by name, in order of declaration."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        meta = field.metadata
        if "help" in meta:
            found[field.name] = Option(
                name=field.name,
                kind=_kind(hints[field.name]),
                default=field.default,
                help=meta["help"],
                environment=meta["env"],
                choices=meta["choices"],
                switch=meta["switch"],
            )
    return found


def coerce(option: Option, value: Any, where: str) -> Any:
    """`value`, as read from a file or the command line, in the type of `option`; None stays None.

    Raises:
        LaunchError: the value is of another type or not among the choices. `where` says where it was read.
    """
    unset = ("none", "null", "") if "none" not in option.choices else ("",)
    if value is None or (isinstance(value, str) and value.strip().lower() in unset):
        return None
    converted = _convert(option, value, where)
    if not option.choices:
        return converted
    spelling = {choice.lower(): choice for choice in option.choices}.get(str(converted).lower())
    if spelling is None:
        allowed = ", ".join(option.choices)
        raise LaunchError(f"{where}: {option.name} is {value!r}, which is not one of: {allowed}.")
    return spelling if option.kind == "str" else converted


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'X'?" for the known name closest to `name`, or "" when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def as_text(value: Any) -> str:
    """`value` as an environment variable carries it: booleans in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(hint: Any) -> Kind:
    candidates = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for candidate, kind in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str")):
        if candidate in candidates:
            return typing.cast("Kind", kind)
    raise TypeError(f"no option can be of type {hint}")


def _convert(option: Option, value: Any, where: str) -> Any:
    wrong = LaunchError(f"{where}: {option.name} is {value!r}; it must be {_NOUN[option.kind]}.")
    if option.kind == "bool":
        text = str(value).strip().lower()
        if text not in _TRUE | _FALSE:
            raise wrong
        return text in _TRUE
    if isinstance(value, bool):
        # YAML reads an unquoted `no` as False; where "no" is a choice, that is what was meant.
        if value is False and "no" in option.choices:
            return "no"
        if option.kind == "str":
            return as_text(value)
        raise wrong
    if option.kind == "str":
        if isinstance(value, (list, tuple)):
            return ",".join(str(item) for item in value)
        if isinstance(value, dict):
            raise wrong
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if option.kind == "float":
        return number
    if not number.is_integer():
        raise wrong
    return int(number)


_NOUN: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
}
