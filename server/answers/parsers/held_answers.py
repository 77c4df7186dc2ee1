"""An answer that is held to a form although it may reason first, or call functions instead."""

from __future__ import annotations

from bigmodel.server.answers.parsers import harmony
from bigmodel.server.answers.parsers.call_grammars import CALL_GRAMMARS
from bigmodel.server.answers.parsers.formats import HARMONY, REASONING_TAGS, AnswerFormat
from bigmodel.server.engine.sampling.expressions import (
    Expression,
    choice,
    free_text,
    literal,
    optional,
    repeated,
    sequence,
    space,
)


def held_answer(form: AnswerFormat | None, held: Expression) -> Expression:
    """Return what an answer may be whose text is ``held``: reasoning is free, and calls have the model's own format.

    Args:
        form: How the answer is read; None where it is shown as the model writes it.
        held: The text.
    """
    if form is None:
        return held
    formats = form.formats
    calls = None
    if form.schemas and formats.tools in CALL_GRAMMARS:
        calls = CALL_GRAMMARS[formats.tools]({name: dict(each) for name, each in form.schemas.items()}, form.single)
    if HARMONY in (formats.tools, formats.reasoning):
        return _harmony(held, calls if formats.tools == HARMONY else None)
    answer = held if calls is None else choice([calls, held])
    if formats.reasoning not in REASONING_TAGS:
        return answer
    begin, end = REASONING_TAGS[formats.reasoning]
    thought = sequence(free_text(end), literal(end), space())
    return sequence(thought if form.opened else optional(sequence(literal(begin), thought)), answer)


def _harmony(held: Expression, calls: Expression | None) -> Expression:
    """Messages after `<|start|>assistant`: analysis, then the final one, or calls."""
    markers = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS)
    begin = literal(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
    analysis = sequence(begin, free_text(*markers), literal(f"{harmony.ENDS[0]}{harmony.START}assistant"))
    final = sequence(
        literal(f"{harmony.CHANNEL}final"),
        optional(literal(f" {harmony.CONSTRAIN}json")),
        literal(harmony.MESSAGE),
        held,
        optional(literal(harmony.ENDS[2])),
    )
    answer = final if calls is None else choice([calls, final])
    return sequence(optional(repeated(analysis, literal(""))), answer)
