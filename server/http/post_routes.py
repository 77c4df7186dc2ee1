"""POST routes of OpenAI's older interface: /v1/chat/completions, /v1/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.answers.openai import ChatAnswer, CompletionAnswer
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.chat_requests import prepare_chat
from bigmodel.server.http.engine_requests import (
    DEFAULT_COMPLETION_TOKENS,
    check_number,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.parsing import JSONRoute, end_turn, in_turn
from bigmodel.server.http.prompts import completion_prompts, given_prompts
from bigmodel.server.http.respond import JoinedRequests, respond
from bigmodel.server.http.state import state_of
from bigmodel.server.http.text_bodies import CompletionBody

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
    """Continue a text, or several."""
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    check_number(engine, len(given_prompts(body)), body.n or 1)
    prompts = await completion_prompts(body, codec, engine.core.max_length, in_turn(http))
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise bad_value("max_tokens", "max_tokens=0 is only allowed with echo=true")
    mailbox = state.mailbox(at_once=not body.stream)
    grammar = await grammar_of(body, state, http)
    requests = []
    for number, prompt in enumerate(prompts):
        params = sampling_params(
            body,
            codec,
            max_tokens=token_limit(body.limit, DEFAULT_COMPLETION_TOKENS, len(prompt), engine.core.max_length),
            logprobs=body.logprobs,
            prompt_logprobs=echo and body.logprobs is not None,
            grammar=grammar,
        )
        requests.append(make_request(state, body, prompt, params, mailbox.sink(number)))
    answer = CompletionAnswer(
        f"cmpl-{uuid.uuid4().hex}",
        int(time.time()),
        state.settings.model_name,
        prompts,
        body.n or 1,
        codec,
        echo=echo,
        logprobs=body.logprobs is not None,
        usage=body.include_usage,
    )
    submit_all(engine, requests)
    end_turn(http)
    return await respond(http, JoinedRequests(engine, requests, mailbox), answer, stream=bool(body.stream))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
    """Answer a conversation."""
    prepared = await prepare_chat(body, http)
    answer = ChatAnswer(
        f"chatcmpl-{uuid.uuid4().hex}",
        int(time.time()),
        state_of(http).settings.model_name,
        body.n or 1,
        prepared.codec,
        logprobs=bool(body.logprobs),
        usage=body.include_usage,
        answer_format=prepared.form,
        shows_reasoning=body.include_reasoning,
    )
    return await prepared.answer(http, answer, stream=bool(body.stream))
