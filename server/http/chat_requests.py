"""Chats: POST /v1/chat/completions, and what responses and Anthropic's messages share with it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import ValidationError
from starlette.responses import Response

from bigmodel.server.answers.openai import ChatAnswer
from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.scheduling.request import Request
from bigmodel.server.http.bodies import Body, release, release_field
from bigmodel.server.http.call_arguments import check_arguments
from bigmodel.server.http.chat_bodies import ChatBody, Message
from bigmodel.server.http.engine_requests import (
    answer_format,
    check_number,
    encode_prompt,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.http.errors import APIError, bad_value, from_validation
from bigmodel.server.http.json_bounds import JSONBoundsError
from bigmodel.server.http.parsing import ANY_SIZE, JSONRoute, OffLoop, end_turn, fetching, in_turn, off_loop
from bigmodel.server.http.reasoning import reasoning_budget, reasoning_variables
from bigmodel.server.http.respond import Answer, JoinedRequests, Mailbox, respond
from bigmodel.server.http.state import state_of
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TemplateError, TemplateTimeError, TextCodec
from bigmodel.server.text.images import ImageError, ImageSupport

B = TypeVar("B", bound=Body)

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
    """Answer a conversation."""
    async with state_of(http).model(http, body.model) as model:
        prepared = await prepare_chat(body, http, model)
        answer = ChatAnswer(
            f"chatcmpl-{uuid.uuid4().hex}",
            int(time.time()),
            state_of(http).adapter_of(body.model) or model.name,
            body.n or 1,
            model.codec,
            logprobs=bool(body.logprobs),
            usage=body.include_usage,
            answer_format=prepared.form,
            shows_reasoning=body.include_reasoning,
            prompt_tokens=len(prepared.request.prompt),
            continuous_usage=body.continuous_usage,
        )
        return await prepared.answer(http, answer, body, stream=bool(body.stream))


@dataclass(frozen=True)
class PreparedChat:
    """A chat as the engine takes it; ``form`` tells calls and reasoning from the text of its answers."""

    engine: Engine
    request: Request
    form: AnswerFormat | None
    mailbox: Mailbox

    async def answer(self, http: HTTPRequest, answer: Answer, *bodies: Body, stream: bool) -> Response:
        """Submit it, release the ``bodies`` that it was made of, and respond with what the engine says."""
        submit_all(self.engine, [self.request])
        end_turn(http)
        release(*bodies)
        return await respond(http, JoinedRequests(self.engine, [self.request], self.mailbox), answer, stream=stream)


async def prepare_chat(
    body: ChatBody,
    http: HTTPRequest,
    model: RunningModel,
    *,
    thinking: bool | None = None,
    usual_effort: str = "medium",
) -> PreparedChat:
    """Tokenise a chat, and translate its parameters. Errors name fields of ``ChatBody``.

    ``thinking``: whether the model is to reason; None leaves that to the model. ``usual_effort``: the effort that is
    meant where none is given.
    """
    engine, codec = model.engine, model.codec
    if body.max_tokens == 0:
        raise bad_value("max_tokens", "max_tokens must be at least 1")
    check_number(engine, 1, body.n or 1)
    effort = body.reasoning_effort
    asked = thinking is not None or effort is not None
    variables = reasoning_variables(codec, thinking, effort, usual_effort) if asked else {}
    longest, fetch = engine.core.max_length, fetching(http)
    prompt, media = await chat_inputs(body, codec, longest, in_turn(http), variables, model.images, fetch)
    form, budget = answer_format(body, model, prompt), body.thinking_token_budget
    params = sampling_params(
        body,
        codec,
        max_tokens=token_limit(body.limit, None, len(prompt), engine.core.max_length, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await grammar_of(body, model, http, form),
        reasoning=None if budget is None else reasoning_budget(budget, form, codec),
        kept_special=None if form is None else form.kept,
    )
    mailbox = state_of(http).mailbox(at_once=not body.stream)
    made = make_request(http, body, prompt, params, mailbox.sink(0), media, state_of(http).adapter_of(body.model))
    return PreparedChat(engine, made, form, mailbox)


# --- the tokens of a conversation -----------------------------------------------------------------------


async def chat_inputs(
    body: ChatBody,
    codec: TextCodec,
    longest: int,
    run: OffLoop = off_loop,
    variables: Mapping[str, Any] | None = None,
    images: ImageSupport | None = None,
    fetch: Callable[[list[str]], Awaitable[Sequence[str | bytes]]] | None = None,
) -> tuple[list[int], Mapping[str, torch.Tensor] | None]:
    """Return the tokens of a conversation in the model's chat template, with `variables` that the body does not set.

    With images, there are other inputs of the model's forward, too; `fetch` brings images that are named by URL. 400
    for variables that the template cannot have, for images that are not accepted, and for more than `longest` tokens.
    """
    check_template_variables(codec, body.chat_template_kwargs)
    tools = None if body.tool_choice == "none" else [tool.plain() for tool in body.tools or ()]
    arguments = {**(variables or {}), **body.template_arguments}
    if body.documents is not None:
        if not codec.has_variable("documents"):
            raise bad_value("documents", "the model's chat template takes none", code="unsupported_parameter")
        arguments["documents"] = body.documents
    urls = [url for message in body.messages for url in message.images]
    special = body.add_special_tokens
    if not urls:
        return await render(codec, body.messages, tools, arguments, longest, special=special, run=run), None
    if images is None:
        raise bad_value("messages", "the model takes no images", code="unsupported_parameter")
    text = await rendered(codec, body.messages, tools, arguments, in_parts=True, run=run)
    await encode_prompt(codec, text, special, images.tokens, "messages", run)  # the processor has no bound
    try:
        images.check_number(len(urls))
        given = urls if fetch is None else await fetch(urls)
        return await run(ANY_SIZE, lambda: images.process(text, given, special=special))
    except ImageError as error:
        raise bad_value("messages", str(error)) from error


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

    400 when the template refuses them, and for more than `longest` tokens.
    """
    if any(message.images for message in messages):
        raise bad_value("messages", "images are accepted in chats alone", code="unsupported_parameter")
    text = await rendered(codec, messages, tools, arguments, run=run)
    return await encode_prompt(codec, text, special, longest, "messages", run)


async def rendered(
    codec: TextCodec,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
    *,
    in_parts: bool = False,
    run: OffLoop = off_loop,
) -> str:
    """Return messages as text, in the chat template with its `arguments`; their contents are given to it `in_parts`.

    400 when the template refuses them, or does not end: a failure that clients try again is as slow each time.
    """
    extra = dict(arguments)
    prompted = extra.pop("add_generation_prompt", True)

    def text(*, arguments_as_objects: bool) -> str:
        given = [message.plain(arguments_as_objects=arguments_as_objects, in_parts=in_parts) for message in messages]
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
        return await run(ANY_SIZE, text_of_any_template)  # a template is a program
    except TemplateError as error:
        raise bad_value("messages", str(error)) from error
    except TemplateTimeError as error:
        raise bad_value("messages", str(error), code="template_too_slow") from error
    except JSONBoundsError as error:
        raise APIError(413, str(error), param="messages", code="body_too_long") from error


# --- bodies of other interfaces -----------------------------------------------------------------------


async def as_chat(http: HTTPRequest, body: B, fields: Callable[[B], dict[str, Any]], conversation: str) -> ChatBody:
    """Return the chat whose ``fields`` ask for the same as a body of another interface.

    The body's field ``conversation`` is released: the chat has its own.
    """

    def chat() -> ChatBody:
        given = fields(body)
        release_field(body, conversation)
        try:
            return ChatBody.model_validate(given)
        except ValidationError as error:
            raise from_validation([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error

    return await in_turn(http)(ANY_SIZE, chat)  # of many messages it takes a while


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors about fields of a chat with what these are called in another interface.

    ``names``: patterns of the fields of a chat, and what replaces them.
    """
    try:
        yield
    except APIError as error:
        raise _renamed(error, names) from error


def _renamed(error: APIError, names: Mapping[str, str]) -> APIError:
    given = error.param or ""
    for pattern, other in names.items():
        found = re.match(rf"{pattern}(?=\.|$)", given)
        if found is not None:
            name = found.expand(other)
            message = error.message.replace(found[0], name)
            param = name + given[found.end() :]
            return APIError(error.status, message, param=param, code=error.code, headers=error.headers)
    return error
