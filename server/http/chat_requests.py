"""A conversation on its way to the engine: what OpenAI's chats and responses and Anthropic's messages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HTTPRequest
from pydantic import ValidationError
from starlette.responses import Response

from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.scheduling.request import Request
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.engine_requests import (
    answer_format,
    check_number,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.http.errors import APIError, bad_value, from_validation
from bigmodel.server.http.parsing import ANY_SIZE, end_turn, in_turn
from bigmodel.server.http.prompts import chat_prompt
from bigmodel.server.http.reasoning import reasoning_budget, reasoning_variables
from bigmodel.server.http.respond import Answer, JoinedRequests, Mailbox, respond
from bigmodel.server.http.state import state_of
from bigmodel.server.text.codec import TextCodec


@dataclass(frozen=True)
class PreparedChat:
    """A chat as the engine takes it; ``form`` tells calls and reasoning from the text of its answers."""

    engine: Engine
    codec: TextCodec
    request: Request
    form: AnswerFormat | None
    mailbox: Mailbox

    async def answer(self, http: HTTPRequest, answer: Answer, *, stream: bool) -> Response:
        """Submit it, and respond with what the engine says."""
        submit_all(self.engine, [self.request])
        end_turn(http)
        return await respond(http, JoinedRequests(self.engine, [self.request], self.mailbox), answer, stream=stream)


async def prepare_chat(
    body: ChatBody, http: HTTPRequest, *, thinking: bool | None = None, usual_effort: str = "medium"
) -> PreparedChat:
    """Tokenise a chat, and translate its parameters. Errors name fields of ``ChatBody``.

    ``thinking``: whether the model is to reason; None leaves that to the model. ``usual_effort``: the effort that is
    meant where none is given.
    """
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    if body.max_tokens == 0:
        raise bad_value("max_tokens", "max_tokens must be at least 1")
    check_number(engine, 1, body.n or 1)
    variables = reasoning_variables(codec, thinking, body.reasoning_effort, usual_effort)
    prompt = await chat_prompt(body, codec, engine.core.max_length, in_turn(http), variables)
    form = answer_format(body, state, codec, prompt)
    params = sampling_params(
        body,
        codec,
        max_tokens=token_limit(body.limit, None, len(prompt), engine.core.max_length, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await grammar_of(body, state, http),
        reasoning=reasoning_budget(body.thinking_token_budget, form, codec),
        kept_special=None if form is None else form.kept,
    )
    mailbox = state.mailbox(at_once=not body.stream)
    return PreparedChat(engine, codec, make_request(state, body, prompt, params, mailbox.sink(0)), form, mailbox)


# --- bodies of other interfaces -----------------------------------------------------------------------


async def as_chat(http: HTTPRequest, fields: Callable[[], dict[str, Any]]) -> ChatBody:
    """Return the chat of these ``fields``, which asks for the same as a body of another interface."""

    def chat() -> ChatBody:
        try:
            return ChatBody.model_validate(fields())
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
