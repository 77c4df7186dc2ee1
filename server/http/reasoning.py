"""How much a model is to reason before it answers: by variables of its chat template, and by a bound on its tokens."""

from __future__ import annotations

from bigmodel.server.answers.parsers.formats import REASONING_TAGS, AnswerFormat
from bigmodel.server.engine.sampling.reasoning_budget import ReasoningBudget
from bigmodel.server.http.errors import bad_value
from bigmodel.server.text.codec import TextCodec

_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch reasoning on and off: that of Qwen and GLM, and that of DeepSeek."""

_EFFORT = "reasoning_effort"


def reasoning_variables(
    codec: TextCodec, thinking: bool | None, effort: str | None, usual: str = "medium"
) -> dict[str, bool | str]:
    """Return the template's variables for whether to reason, and how much.

    400 for an effort where the template has no levels of it, nor a switch for "none"; but not for the ``usual`` one of
    an interface, which is the same as none given.
    """
    switches = [name for name in _SWITCHES if codec.has_variable(name)]
    if effort is None:
        return {} if thinking is None else dict.fromkeys(switches, thinking)
    if codec.has_variable(_EFFORT):
        return {_EFFORT: effort, **({} if thinking is None else dict.fromkeys(switches, thinking))}
    if effort == usual:
        return {} if thinking is None else dict.fromkeys(switches, thinking)
    if effort == "none" and switches:
        return dict.fromkeys(switches, False)
    why = "the model's chat template has no levels of reasoning"
    raise bad_value(_EFFORT, why, code="unsupported_parameter")


def reasoning_budget(tokens: int, form: AnswerFormat | None, codec: TextCodec) -> ReasoningBudget | None:
    """Return the bound on the reasoning of an answer; None where the model does not reason.

    400 for a model whose reasoning has no tag that ends it.
    """
    if form is None or form.closed or form.formats.reasoning is None:
        return None
    tags = REASONING_TAGS.get(form.formats.reasoning)
    if tags is None:
        why = f"the reasoning of the format '{form.formats.reasoning}' cannot be bounded"
        raise bad_value("thinking_token_budget", why, code="unsupported_parameter")
    return ReasoningBudget(tokens, tags, form.opened, codec)
