"""The grammar of an answer in xgrammar's notation: one set of rules for all that the answer may be.

Each schema is written by xgrammar, with rules of its own for numbers, strings and every white space. Rules that mean
the same become one, whatever schema they are of: a compiled grammar grows with the square of their number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

WHITESPACE = 4
"""Consecutive whitespace characters in an answer; with any number of them a model may never end."""

BLOCK = 32
"""Characters of a bounded string that are counted at once: a compiled grammar grows with their square."""

MOST_BLOCKS = 512
"""Longer strings are not counted in blocks: they compile to more than is accepted either way."""

# Texts, sets of characters, and strings of bounded length, in a grammar that xgrammar has written.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|(\w+_characters)\{(\d+), (\d+)\}')
# The set for a string whose length is bounded, which has tabs and other control characters: these are not JSON.
_BOUNDED = r"""[^\"\\\r\n]"""
_BOUNDED_JSON = r"""[^\"\\\0-\x1f]"""

# Texts and sets of characters, and names of rules.
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([A-Za-z_]\w*)')
_SPACE_BODY = r"(([ \n\r\t]))"
_SPACE = f"space ::= [ \\n\\r\\t]{{0, {WHITESPACE}}}"

Rules = dict[str, str]
"""Bodies of rules, by name."""


def grammar_text(xgrammar: Any, expression: Mapping[str, Any]) -> str:
    """Return the grammar of an answer, whose rule ``root`` is the whole of it.

    Args:
        xgrammar: The module.
        expression: See :mod:`bigmodel.server.engine.sampling.expressions`.

    Raises:
        RuntimeError: xgrammar refuses a schema.
    """
    writer = _Writer(xgrammar)
    writer.rules["root"] = writer.write(expression)
    rules = _reached(_merged(writer.rules))
    return "\n".join([*(f"{name} ::= {body}" for name, body in rules.items()), _SPACE, ""])


class _Writer:
    """Writes nodes of one tree; equal nodes are written once."""

    def __init__(self, xgrammar: Any) -> None:
        self.rules: Rules = {}
        self._xgrammar = xgrammar
        self._names: dict[str, str] = {}

    def write(self, node: Mapping[str, Any]) -> str:
        """Return a node as an expression of the notation; adds the rules that it needs."""
        if "literal" in node:
            return _quoted(node["literal"])
        if "space" in node:
            return "space"
        if "characters" in node:
            least, most, excluded = node["characters"]
            return f"[^{_in_set(excluded)}]{{{least}, {-1 if most is None else most}}}"
        key = json.dumps(node)
        if key not in self._names:
            self._names[key] = name = f"part_{len(self._names)}"
            self.rules[name] = self._body(node, name)
        return self._names[key]

    def _body(self, node: Mapping[str, Any], name: str) -> str:
        if "schema" in node:
            return self._of_schema(json.dumps(node["schema"]), name)
        if "free" in node:
            return _free(node["free"])
        if "sequence" in node:
            return " ".join(map(self.write, node["sequence"])) or '""'
        if "choice" in node:
            return " | ".join(f"({self.write(option)})" for option in node["choice"])
        if "optional" in node:
            return f'"" | ({self.write(node["optional"])})'
        part = self.write(node["repeated"])
        return f"{part} ({self.write(node['between'])} {part})*"

    def _of_schema(self, schema: str, name: str) -> str:
        """Add the rules of a schema, and return the name of its first one."""
        written = str(self._xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=WHITESPACE))
        found = dict(line.split(" ::= ", 1) for line in _mended(written).splitlines() if " ::= " in line)
        renamed = {rule: f"{name}_{rule}" for rule in found}
        self.rules |= {renamed[rule]: _with_names(body, renamed) for rule, body in found.items()}
        return renamed["root"]


# --- fewer rules --------------------------------------------------------------------------------------


def _merged(rules: Rules) -> Rules:
    """Return rules of which no two mean the same for the same reason: each stands for all that differ in names alone.

    Those are told apart round by round: by their bodies without names, then by the groups of the rules that they name.
    """
    group = dict.fromkeys(rules, "")
    while True:
        numbers: dict[str, str] = {}
        found = {}
        for name, body in rules.items():
            # With the group so far, groups are only ever divided.
            found[name] = numbers.setdefault(f"{group[name]}:{_with_names(body, group)}", str(len(numbers)))
        if len(numbers) == len(set(group.values())):
            break
        group = found
    first: dict[str, str] = {}
    for name in rules:
        first.setdefault(group[name], name)
    names = {name: first[group[name]] for name in rules}
    spaces = {name for name, body in rules.items() if body == _SPACE_BODY}
    spaced = re.compile(rf"\b({'|'.join(sorted(spaces)) or '(?!)'})\{{0, {WHITESPACE}\}}")
    return {name: _with_names(_outside_texts(spaced, rules[name]), names) for name in first.values()}


def _outside_texts(spaced: re.Pattern[str], body: str) -> str:
    """Replace bounded white space by the one rule of it, but not within texts."""
    pieces = re.compile(rf'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|{spaced.pattern}')
    return pieces.sub(lambda found: "space" if found[1] else found[0], body)


def _reached(rules: Rules) -> Rules:
    """Return the rules that the first one needs."""
    found, pending = {"root"}, ["root"]
    while pending:
        for name in _names_in(rules[pending.pop()]):
            if name in rules and name not in found:
                found.add(name)
                pending.append(name)
    return {name: body for name, body in rules.items() if name in found}


def _with_names(body: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[1], found[1]) if found[1] else found[0], body)


def _names_in(body: str) -> Iterator[str]:
    return (found[1] for found in _NAME.finditer(body) if found[1])


# --- parts of a grammar -------------------------------------------------------------------------------


def _mended(written: str) -> str:
    """A grammar of xgrammar's without control characters in strings, and with long strings counted in blocks."""
    rules: Rules = {}

    def mended(piece: re.Match[str]) -> str:
        if piece[1] is not None:
            return _in_blocks(piece[1], int(piece[2]), int(piece[3]), rules) or piece[0]
        return _BOUNDED_JSON if piece[0] == _BOUNDED else piece[0]

    text = _PIECE.sub(mended, written)
    return "\n".join([text, *(f"{name} ::= {rule}" for name, rule in rules.items())])


def _in_blocks(one: str, least: int, most: int, rules: Rules) -> str:
    """Return `least` to `most` of the rule ``one`` as an expression, with what it needs in `rules`; "" where few are
    counted."""
    blocks, rest = divmod(most - least, BLOCK)
    if not 2 <= blocks <= MOST_BLOCKS:
        return ""
    rules[f"{one}_block"] = f"{one}{{{BLOCK}, {BLOCK}}}"
    rules[f"{one}_{rest}_0"] = f"{one}{{0, {rest}}}" if rest else '""'
    for number in range(1, blocks + 1):  # a whole block and those behind it, or less than a block
        rules[f"{one}_{rest}_{number}"] = f"({one}_block {one}_{rest}_{number - 1}) | ({one}{{0, {BLOCK - 1}}})"
    first = f"{one}{{{least}, {least}}} " if least else ""
    return f"{first}{one}_{rest}_{blocks}"


def _free(excluded: list[str]) -> str:
    """Text without ``excluded``: after each beginning of one of them comes what goes on with none, or nothing."""
    first = excluded[0][0]
    if any(text.rfind(first) != 0 for text in excluded):
        raise ValueError(f"{excluded} do not begin with one character that is in none of them again")
    plain = f"[^{_in_set(first)}]"
    beginnings = sorted({text[:size] for text in excluded for size in range(1, len(text))})
    parts = []
    for beginning in beginnings:
        following = {text[len(beginning)] for text in excluded if text.startswith(beginning)}
        others = f"[^{_in_set(first + ''.join(sorted(following)))}]"
        parts.append(f"({_quoted(beginning)} ({others} {plain}*)?)")
    return f"{plain}* ({' | '.join(parts)})*"


def _in_set(letters: str) -> str:
    return re.sub(r"([\\\]\[^-])", r"\\\1", letters)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
