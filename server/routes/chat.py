"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from bigmodel.server.answering import Joined, respond
from bigmodel.server.answers.chat import ChatAnswer
from bigmodel.server.errors import bad_value
from bigmodel.server.intake import (
    chat_prompt,
    check_number,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.schemas import ChatBody
from bigmodel.server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, http: Request) -> Response:
    """Answer a conversation."""
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    if body.max_tokens == 0:
        raise bad_value("max_tokens", "max_tokens must be at least 1")
    check_number(engine, 1, body.n or 1)
    prompt = await chat_prompt(body, codec)
    params = sampling_params(
        body,
        codec,
        max_tokens=token_limit(body.limit, None, len(prompt), engine.core.max_length, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await grammar_of(body, state),
    )
    mailbox = state.mailbox(at_once=not body.stream)
    request = make_request(state, body, prompt, params, mailbox.slot(0))
    answer = ChatAnswer(
        f"chatcmpl-{uuid.uuid4().hex}",
        int(time.time()),
        state.settings.model_name,
        body.n or 1,
        codec,
        logprobs=bool(body.logprobs),
        usage=body.include_usage,
    )
    submit_all(engine, [request])
    return await respond(http, Joined(engine, [request], mailbox), answer, stream=bool(body.stream))
