"""From what clients send to the tokens of prompts: texts, lists of tokens, and conversations in the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bigmodel.server.http.call_arguments import check_arguments
from bigmodel.server.http.chat_bodies import ChatBody, Message
from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.json_bounds import JSONBoundsError
from bigmodel.server.http.parsing import ANY_SIZE, OffLoop, off_loop
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.text.codec import TemplateError, TextCodec, TooManyTokensError


def given_prompts(body: CompletionBody) -> list[Any]:
    """Prompts of a completion, each a text or a list of tokens."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


async def completion_prompts(
    body: CompletionBody, codec: TextCodec, longest: int, run: OffLoop = off_loop
) -> list[list[int]]:
    """Return the prompts of a completion as tokens; 413 for one of more than `longest`."""
    prompts = []
    for one in given_prompts(body):
        if isinstance(one, str):
            one = await _encode(codec, one, body.add_special_tokens, longest, "prompt", run)
        elif len(one) > longest:
            raise too_long(len(one), longest, "prompt")
        elif max(one) >= codec.vocabulary_size:
            raise bad_value("prompt", f"token {max(one)} is not in the vocabulary of {codec.vocabulary_size}")
        prompts.append(one)
    return prompts


async def chat_prompt(
    body: ChatBody,
    codec: TextCodec,
    longest: int,
    run: OffLoop = off_loop,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation in the model's chat template, with `variables` that the body does not set.

    400 for variables that the template cannot have, 413 for more than `longest` tokens.
    """
    check_template_variables(codec, body.chat_template_kwargs)
    tools = None if body.tool_choice == "none" else [tool.plain() for tool in body.tools or ()]
    arguments = {**(variables or {}), **body.template_arguments}
    if body.documents is not None:
        if not has_variable(codec, "documents"):
            raise bad_value("documents", "the model's chat template takes none", code="unsupported_parameter")
        arguments["documents"] = body.documents
    return await render(codec, body.messages, tools, arguments, longest, special=body.add_special_tokens, run=run)


def has_variable(codec: TextCodec, name: str) -> bool:
    """Whether the chat template has a variable: no attribute, no text and no part of another name."""
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", codec.template_source) is not None


def check_template_variables(codec: TextCodec, variables: Mapping[str, Any] | None) -> None:
    """400 for variables that the chat template cannot have."""
    taken = codec.not_for_templates & (variables or {}).keys()
    if taken:
        raise bad_value("chat_template_kwargs", f"'{min(taken)}' is no variable of the chat template")


async def render(
    codec: TextCodec,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
    longest: int | None = None,
    *,
    special: bool = False,
    run: OffLoop = off_loop,
) -> list[int]:
    """Return the tokens of messages in the chat template with its `arguments`.

    400 when the template refuses them, 413 for more than `longest` tokens.
    """
    extra = dict(arguments)
    prompted = extra.pop("add_generation_prompt", True)

    def text(*, arguments_as_objects: bool) -> str:
        given = [message.plain(arguments_as_objects=arguments_as_objects) for message in messages]
        if "developer" not in codec.template_source:  # templates leave out roles that they do not know
            given = [{**each, "role": "system"} if each["role"] == "developer" else each for each in given]
        return codec.render_chat(given, tools=tools, add_generation_prompt=prompted, extra=extra)

    def text_of_any_template() -> str:
        calls = [call for message in messages for call in message.tool_calls or ()]
        if calls:
            check_arguments(calls)
        try:
            return text(arguments_as_objects=True)
        except TemplateError:
            # Some templates, DeepSeek's among them, take arguments as JSON text only.
            with suppress(TemplateError):
                if calls:
                    return text(arguments_as_objects=False)
            raise

    try:
        rendered = await run(ANY_SIZE, text_of_any_template)  # a template is a program
    except TemplateError as error:
        raise bad_value("messages", str(error)) from error
    except JSONBoundsError as error:
        raise APIError(413, str(error), param="messages", code="body_too_long") from error
    return await _encode(codec, rendered, special, longest, "messages", run)


async def _encode(
    codec: TextCodec, text: str, special: bool, longest: int | None, field: str, run: OffLoop
) -> list[int]:
    try:
        return await run(len(text), lambda: codec.encode(text, add_special_tokens=special, longest=longest))
    except TooManyTokensError as error:
        assert longest is not None
        raise too_long(error.least, longest, field, "at least ") from error


def too_long(tokens: int, longest: int, field: str, least: str = "") -> APIError:
    """413: a prompt of the body's ``field`` has more tokens than fit; ``least`` is what is said before their number."""
    return APIError(
        413,
        f"the prompt has {least}{tokens} tokens; with at least one to generate, at most {longest} fit",
        param=field,
        code="context_length_exceeded",
    )
