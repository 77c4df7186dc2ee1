"""Whether a value fits a JSON schema, with bounded work; for the arguments of functions that are strict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

UNCHECKED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("pattern", "patternProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems"),
        *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that are not checked. A schema that has one cannot be used here."""

STEPS = 20_000
"""Most comparisons of a value with a part of the schema; a value that takes more does not fit."""

_NAMED = frozenset(("properties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const", "default", "examples"))

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _number(value),
    "integer": lambda value: _number(value) and value == int(value),
}


def unchecked_keyword(schema: Any) -> str | None:
    """Return the first keyword of a schema that is not checked."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        if not isinstance(part, dict):
            continue
        for key, inner in part.items():
            if key in UNCHECKED:
                return str(key)
            if key in _NAMED and isinstance(inner, dict):
                pending += inner.values()
            elif key not in _VALUES:
                pending.append(inner)
    return None


def fits(value: Any, schema: Any) -> bool:
    """Return whether `value`, as parsed from JSON, fits `schema`, which has none of the `UNCHECKED` keywords.

    Nothing fits a schema that is none.
    """
    return fits_part(value, schema, schema)


def fits_part(value: Any, part: Any, root: Any) -> bool:
    """As :func:`fits`, for a ``part`` of the schema ``root``."""
    try:
        return _Check(root).fits(value, part)
    except (RecursionError, _TooLongError):
        return False
    except (TypeError, AttributeError):  # a keyword has a value of the wrong type
        return False


class _TooLongError(Exception):
    """The check takes too many steps."""


class _Check:
    """One check of a value; ``root`` is the document that references are about."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def fits(self, value: Any, schema: Any) -> bool:
        self._steps += 1
        if self._steps > STEPS:
            raise _TooLongError
        if not isinstance(schema, dict):
            return schema is True
        return (
            self._is_one_of_the_values(value, schema)
            and self._fits_combinations(value, schema)
            and (not isinstance(value, dict) or self._fits_object(value, schema))
            and (not isinstance(value, list) or self._fits_list(value, schema))
            and (not isinstance(value, str) or _between(len(value), schema.get("minLength"), schema.get("maxLength")))
            and (not _number(value) or _fits_number(value, schema))
        )

    def _is_one_of_the_values(self, value: Any, schema: Mapping[str, Any]) -> bool:
        kinds = schema.get("type", list(_TYPES))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return (
            any(_TYPES[kind](value) for kind in kinds if kind in _TYPES)
            and ("const" not in schema or _same(value, schema["const"]))
            and ("enum" not in schema or any(_same(value, one) for one in schema["enum"]))
        )

    def _fits_combinations(self, value: Any, schema: Mapping[str, Any]) -> bool:
        return (
            ("$ref" not in schema or self.fits(value, self._referred(schema["$ref"])))
            and all(self.fits(value, one) for one in schema.get("allOf", ()))
            and ("anyOf" not in schema or any(self.fits(value, one) for one in schema["anyOf"]))
            and ("oneOf" not in schema or sum(self.fits(value, one) for one in schema["oneOf"]) == 1)
        )

    def _fits_object(self, value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            self.fits(inner, known.get(name, others)) for name, inner in value.items()
        )

    def _fits_list(self, value: list[Any], schema: Mapping[str, Any]) -> bool:
        items = schema.get("items", True)
        return _between(len(value), schema.get("minItems"), schema.get("maxItems")) and all(
            self.fits(inner, items) for inner in value
        )

    def _referred(self, reference: Any) -> Any:
        """The part of the document that a reference names; False, which nothing fits, if there is none."""
        found = self._root
        first, *path = str(reference).split("/")
        if first != "#":
            return False
        for name in path:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return False
            found = found[name]
        return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _between(value: Any, least: Any, most: Any) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _fits_number(value: Any, schema: Mapping[str, Any]) -> bool:
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return (
        _between(value, schema.get("minimum"), schema.get("maximum"))
        and (above is None or value > above)
        and (below is None or value < below)
    )
