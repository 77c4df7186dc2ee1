"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

import uuid

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.answers.anthropic import MessageAnswer
from bigmodel.server.http.chat_requests import as_chat, chat_inputs, fields_named, prepare_chat
from bigmodel.server.http.messages_bodies import CountTokensBody, MessagesBody
from bigmodel.server.http.messages_chats import FIELDS, USUAL_EFFORT, chat_fields, thinking_wanted
from bigmodel.server.http.parsing import JSONRoute, fetching, in_turn
from bigmodel.server.http.reasoning import reasoning_variables
from bigmodel.server.http.state import state_of

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/messages")
async def messages(body: MessagesBody, http: HTTPRequest) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    thinking = thinking_wanted(body)
    with fields_named(FIELDS):
        chat = await as_chat(http, body, chat_fields, "messages")
    async with state_of(http).model(http, body.model) as model:
        with fields_named(FIELDS):
            prepared = await prepare_chat(chat, http, model, thinking=thinking, usual_effort=USUAL_EFFORT)
        hidden = thinking is False or (body.thinking is not None and body.thinking.display == "omitted")
        tokens = len(prepared.request.prompt)
        name = f"msg_{uuid.uuid4().hex[:24]}"
        answer = MessageAnswer(
            name, state_of(http).adapter_of(body.model) or model.name, tokens, prepared.form, shows_thinking=not hidden
        )
        return await prepared.answer(http, answer, body, chat, stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, http: HTTPRequest) -> dict[str, int]:
    """The tokens of a conversation, as its answer would count them."""
    async with state_of(http).model(http, body.model) as model:
        with fields_named(FIELDS):
            chat = await as_chat(http, body, chat_fields, "messages")
            variables = reasoning_variables(model.codec, thinking_wanted(body), chat.reasoning_effort, USUAL_EFFORT)
            longest, images, fetch = model.engine.core.max_length, model.images, fetching(http)
            prompt, _ = await chat_inputs(chat, model.codec, longest, in_turn(http), variables, images, fetch)
    return {"input_tokens": len(prompt)}
