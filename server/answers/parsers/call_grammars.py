"""What the calls of each format look like, for a grammar that holds an answer to calls or to another form.

Each function returns the expression of one call or several, as the parser of that format reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from bigmodel.server.answers.parsers import (
    deepseek,
    function_gemma,
    gemma,
    glm,
    glm4,
    harmony,
    hermes,
    invoke_xml,
    kimi,
    llama3,
    llama4,
    mistral,
    qwen_xml,
)
from bigmodel.server.answers.parsers.value_grammars import Root, tagged_value, with_root
from bigmodel.server.engine.sampling.expressions import (
    Expression,
    choice,
    free_text,
    json_text,
    literal,
    optional,
    repeated,
    sequence,
    space,
)

Schemas: TypeAlias = Mapping[str, dict[str, Any]]
"""Schemas of the arguments of functions, by their names."""

CallGrammar: TypeAlias = Callable[[Schemas, bool], Expression]
"""Takes the functions, and whether there is one call only."""

Argument: TypeAlias = Callable[[str, Any, Root], Expression]
"""Takes the name of an argument, its schema, and the schema that this is of."""

_LIMITS = frozenset(("const", "pattern", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "$ref"))
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def _several(call: Expression, single: bool, between: Expression) -> Expression:
    return call if single else repeated(call, between)


def _object(name: str, schema: dict[str, Any], arguments: str = "arguments") -> Expression:
    """A call as a JSON object."""
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '
    return sequence(literal(begin), json_text(schema), literal("}"))


def _objects(schemas: Schemas, single: bool) -> Expression:
    """The calls of a JSON list, without its brackets."""
    call = choice([_object(name, schema) for name, schema in schemas.items()])
    return _several(call, single, sequence(literal(","), space()))


def _tagged(call: Expression, single: bool) -> Expression:
    tagged = sequence(literal(hermes.BEGIN), space(), call, space(), literal(hermes.END))
    return _several(tagged, single, space())


def hermes_calls(schemas: Schemas, single: bool) -> Expression:
    return _tagged(choice([_object(name, schema) for name, schema in schemas.items()]), single)


def llama3_calls(schemas: Schemas, single: bool) -> Expression:
    call = choice([_object(name, schema, "parameters") for name, schema in schemas.items()])
    between = sequence(space(), literal(";"), space())
    return sequence(optional(literal(llama3.TAG)), _several(call, single, between))


def mistral_calls(schemas: Schemas, single: bool) -> Expression:
    listed = sequence(literal(mistral.CALLS), space(), literal("["), _objects(schemas, single), literal("]"))
    named = [
        sequence(literal(f"{mistral.CALLS}{name}{mistral.ARGS}"), json_text(schema)) for name, schema in schemas.items()
    ]
    return choice([listed, _several(choice(named), single, space())])


def deepseek_calls(schemas: Schemas, single: bool) -> Expression:
    calls = []
    for name, schema in schemas.items():
        fence = literal(f"function{deepseek.SEPARATOR}{name}\n{deepseek.FENCE}json\n")
        calls.append(sequence(fence, json_text(schema), literal(f"\n{deepseek.FENCE}")))
        calls.append(sequence(literal(f"{name}{deepseek.SEPARATOR}"), json_text(schema)))
    call = sequence(literal(deepseek.CALL), choice(calls), literal(deepseek.CALL_END))
    return sequence(literal(deepseek.CALLS), _several(call, single, space()), literal(deepseek.CALLS_END))


def kimi_calls(schemas: Schemas, single: bool) -> Expression:
    marks = kimi.MARKS
    number = json_text({"type": "integer", "minimum": 0})
    calls = [
        sequence(literal(f"{marks.call}functions.{name}:"), number, literal(marks.separator), json_text(schema))
        for name, schema in schemas.items()
    ]
    call = sequence(choice(calls), literal(marks.call_end))
    return sequence(literal(marks.calls), _several(call, single, space()), literal(marks.calls_end))


def glm4_calls(schemas: Schemas, single: bool) -> Expression:
    calls = [sequence(literal(f"{name}\n"), json_text(schema)) for name, schema in schemas.items()]
    return _several(choice(calls), single, literal(glm4.NEXT))


def llama4_calls(schemas: Schemas, single: bool) -> Expression:
    call = choice([_object(name, schema, "parameters") for name, schema in schemas.items()])
    between = sequence(space(), literal(";"), space())
    return sequence(optional(literal(llama4.START)), _several(call, single, between), optional(literal(llama4.END)))


def invoke_calls(marks: invoke_xml.InvokeMarks) -> CallGrammar:
    """Calls between the tags of a family."""
    excluded = (marks.argument_end, marks.call_end, *(end for _, end in marks.blocks))

    def argument(key: str, part: Any, root: Root) -> Expression:
        kinds = part.get("type") if isinstance(part, dict) else None
        typed = f' string="{"true" if kinds == "string" else "false"}"' if marks.typed else ""
        value = tagged_value(part, root, excluded)
        return sequence(literal(f'{marks.argument}{key}"{typed}>'), value, literal(marks.argument_end), space())

    def calls(schemas: Schemas, single: bool) -> Expression:
        begin, end = marks.blocks[0]
        call = sequence(
            _with_arguments(schemas, lambda name: sequence(literal(f'{marks.call}{name}">'), space()), argument),
            literal(marks.call_end),
        )
        return sequence(literal(begin), space(), _several(call, single, space()), space(), literal(end))

    return calls


def glm_calls(schemas: Schemas, single: bool) -> Expression:
    excluded = (glm.KEY, glm.VALUE_END, hermes.END)

    def argument(key: str, part: Any, root: Root) -> Expression:
        begin = literal(f"{glm.KEY}{key}{glm.KEY_END}")
        value = tagged_value(part, root, excluded)
        return sequence(begin, space(), literal(glm.VALUE), value, literal(glm.VALUE_END), space())

    return _tagged(_with_arguments(schemas, lambda name: sequence(literal(name), space()), argument), single)


def qwen_xml_calls(schemas: Schemas, single: bool) -> Expression:
    excluded = (qwen_xml.PARAMETER, qwen_xml.PARAMETER_END, qwen_xml.FUNCTION_END, hermes.END)

    def argument(key: str, part: Any, root: Root) -> Expression:
        begin, end = literal(f"{qwen_xml.PARAMETER}{key}>\n"), literal(f"\n{qwen_xml.PARAMETER_END}")
        return sequence(begin, tagged_value(part, root, excluded), end, space())

    def head(name: str) -> Expression:
        return sequence(literal(f"{qwen_xml.FUNCTION}{name}>"), space())

    call = sequence(_with_arguments(schemas, head, argument), literal(qwen_xml.FUNCTION_END))
    return _tagged(call, single)


def _with_arguments(
    schemas: Schemas,
    head: Callable[[str], Expression],
    argument: Argument,
) -> Expression:
    """Functions with their arguments between tags: those that are required, and perhaps others, in their order."""
    calls = []
    for name, schema in schemas.items():
        required, root = schema.get("required", ()), Root(schema)
        parts = [
            one if key in required else optional(one)
            for key, part in _properties(schema).items()
            for one in [argument(key, part, root)]
        ]
        calls.append(sequence(head(name), *parts))
    return choice(calls)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def gemma_calls(schemas: Schemas, single: bool) -> Expression:
    """Python, or JSON where a name is none of Python's."""
    names = [name for function, schema in schemas.items() for name in (*function.split("."), *_properties(schema))]
    begin, end = literal(f"{gemma.CODE}\n"), literal(f"\n{gemma.END}")

    def python_argument(key: str, part: Any, root: Root) -> Expression:
        return sequence(literal(f"{key}="), json_text(with_root(part, ("properties", key), root)))

    if all(map(_IDENTIFIER.fullmatch, names)) and "print" not in schemas:
        call = choice(
            [
                sequence(literal(f"{name}("), _keywords(schema, python_argument, ", "), literal(")"))
                for name, schema in schemas.items()
            ]
        )
        return sequence(begin, _several(call, single, literal("\n")), end)
    return sequence(begin, literal("["), _objects(schemas, single), literal("]"), end)


def function_gemma_calls(marks: function_gemma.Marks) -> CallGrammar:
    """Calls between the markers of a family of Gemma's."""

    def argument(key: str, part: Any, root: Root) -> Expression:
        quote = literal(marks.quote)
        if not isinstance(part, dict) or part.get("type") != "string" or part.keys() & _LIMITS:
            return sequence(literal(f"{key}:"), json_text(with_root(part, ("properties", key), root)))
        values = [literal(value) for value in part.get("enum", ()) if isinstance(value, str)]
        return sequence(literal(f"{key}:"), quote, choice(values) if values else free_text(marks.quote), quote)

    def calls(schemas: Schemas, single: bool) -> Expression:
        call = [
            sequence(
                literal(f"{marks.begin}call:{name}{{"), _keywords(schema, argument, ","), literal(f"}}{marks.end}")
            )
            for name, schema in schemas.items()
        ]
        return _several(choice(call), single, literal(""))

    return calls


def _keywords(schema: dict[str, Any], argument: Argument, comma: str) -> Expression:
    """Arguments with their names, one after another; those that are not required may be left out."""
    required, root = schema.get("required", ()), Root(schema)
    given = [(key in required, argument(key, part, root)) for key, part in _properties(schema).items()]
    behind: list[Expression] = [literal("")]  # what may follow the arguments up to each one, from the last to the first
    for needed, one in reversed(given):
        following = sequence(literal(comma), one)
        behind.append(sequence(following if needed else optional(following), behind[-1]))
    behind.reverse()
    options = []
    for index, (needed, one) in enumerate(given):
        options.append(sequence(one, behind[index + 1]))
        if needed:
            return choice(options)
    return choice([*options, literal("")])


def harmony_calls(schemas: Schemas, single: bool) -> Expression:
    calls = [
        sequence(
            literal(f"{harmony.CHANNEL}commentary to=functions.{name}"),
            optional(literal(f" {harmony.CONSTRAIN}json")),
            literal(harmony.MESSAGE),
            json_text(schema),
            optional(literal(harmony.ENDS[1])),
        )
        for name, schema in schemas.items()
    ]
    return _several(choice(calls), single, literal(f"{harmony.START}assistant"))


CALL_GRAMMARS: dict[str, CallGrammar] = {
    "deepseek": deepseek_calls,
    "deepseek-dsml": invoke_calls(invoke_xml.DEEPSEEK),
    "function-gemma": function_gemma_calls(function_gemma.FUNCTION_GEMMA),
    "gemma": gemma_calls,
    "gemma4": function_gemma_calls(function_gemma.GEMMA_4),
    "glm": glm_calls,
    "glm4": glm4_calls,
    "harmony": harmony_calls,
    "hermes": hermes_calls,
    "kimi": kimi_calls,
    "llama3": llama3_calls,
    "llama4": llama4_calls,
    "minimax": invoke_calls(invoke_xml.MINIMAX),
    "mistral": mistral_calls,
    "qwen-xml": qwen_xml_calls,
}
"""By the names of the formats, see :data:`bigmodel.server.answers.parsers.formats.TOOL_FORMATS`."""
