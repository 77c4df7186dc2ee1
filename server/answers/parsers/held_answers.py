"""An answer that is held to a form or to calls although it may reason first, or call functions instead."""

from __future__ import annotations

from bigmodel.server.answers.parsers import harmony
from bigmodel.server.answers.parsers.call_grammars import CALL_GRAMMARS
from bigmodel.server.answers.parsers.formats import HARMONY, REASONING_TAGS, AnswerFormat
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
from bigmodel.server.engine.sampling.tool_schema import calls_schema


def held_answer(form: AnswerFormat | None, held: Expression) -> Expression:
    """Return what an answer may be whose text is ``held``: reasoning is free, and calls have the model's own format.

    Args:
        form: How the answer is read; None where it is shown as the model writes it.
        held: The text.
    """
    if form is None:
        return held
    calls = _own_calls(form) if form.schemas else None
    if HARMONY in (form.formats.tools, form.formats.reasoning):
        final = _harmony_final(held)
        return _after_analysis(choice([calls, final]) if calls and form.formats.tools == HARMONY else final)
    return _after_reasoning(form, held if calls is None else choice([calls, held]))


def required_calls(form: AnswerFormat) -> Expression:
    """Return what an answer may be that has to call functions: reasoning is free, and calls are what `form` reads."""
    if form.formats.tools == HARMONY:
        calls = _own_calls(form)
        assert calls is not None
        return _after_analysis(calls)
    schemas = {name: dict(each) for name, each in form.schemas.items()}
    return _after_reasoning(form, json_text(calls_schema(schemas, single=form.single)))


def _own_calls(form: AnswerFormat) -> Expression | None:
    """Calls in the format of the model; None if it has none."""
    if form.formats.tools not in CALL_GRAMMARS:
        return None
    return CALL_GRAMMARS[form.formats.tools]({name: dict(each) for name, each in form.schemas.items()}, form.single)


def _after_reasoning(form: AnswerFormat, answer: Expression) -> Expression:
    """Reasoning between tags, where the model may write it, and then the answer."""
    if form.closed or form.formats.reasoning not in REASONING_TAGS:
        return answer
    begin, end = REASONING_TAGS[form.formats.reasoning]
    thought = sequence(free_text(end), literal(end), space())
    return sequence(thought if form.opened else optional(sequence(literal(begin), thought)), answer)


def _harmony_final(held: Expression) -> Expression:
    """The message that is the answer."""
    return sequence(
        literal(f"{harmony.CHANNEL}final"),
        optional(literal(f" {harmony.CONSTRAIN}json")),
        literal(harmony.MESSAGE),
        held,
        optional(literal(harmony.ENDS[2])),
    )


def _after_analysis(answer: Expression) -> Expression:
    """Messages after `<|start|>assistant`: analysis, then the answer."""
    markers = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS)
    begin = literal(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
    analysis = sequence(begin, free_text(*markers), literal(f"{harmony.ENDS[0]}{harmony.START}assistant"))
    return sequence(optional(repeated(analysis, literal(""))), answer)
