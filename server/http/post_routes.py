"""POST routes: /v1/chat/completions, /v1/completions, /tokenize, /detokenize."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.answers.openai import ChatAnswer, CompletionAnswer
from bigmodel.server.http.bodies import ChatBody
from bigmodel.server.http.engine_requests import (
    DEFAULT_COMPLETION_TOKENS,
    answer_format,
    chat_prompt,
    check_number,
    completion_prompts,
    given_prompts,
    grammar_of,
    make_request,
    render,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.parsing import JSONRoute, end_turn, in_turn
from bigmodel.server.http.respond import JoinedRequests, respond
from bigmodel.server.http.state import state_of
from bigmodel.server.http.text_bodies import CompletionBody, DetokenizeBody, TokenizeBody

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
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    if body.max_tokens == 0:
        raise bad_value("max_tokens", "max_tokens must be at least 1")
    check_number(engine, 1, body.n or 1)
    prompt = await chat_prompt(body, codec, engine.core.max_length, in_turn(http))
    form = answer_format(body, state, codec, prompt)
    params = sampling_params(
        body,
        codec,
        max_tokens=token_limit(body.limit, None, len(prompt), engine.core.max_length, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await grammar_of(body, state, http),
        kept_special=None if form is None else form.kept,
    )
    mailbox = state.mailbox(at_once=not body.stream)
    request = make_request(state, body, prompt, params, mailbox.sink(0))
    answer = ChatAnswer(
        f"chatcmpl-{uuid.uuid4().hex}",
        int(time.time()),
        state.settings.model_name,
        body.n or 1,
        codec,
        logprobs=bool(body.logprobs),
        usage=body.include_usage,
        answer_format=form,
    )
    submit_all(engine, [request])
    end_turn(http)
    return await respond(http, JoinedRequests(engine, [request], mailbox), answer, stream=bool(body.stream))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HTTPRequest) -> dict[str, Any]:
    """The tokens of a text, or of a conversation in the model's chat template."""
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    if body.messages is not None:
        tokens = await render(codec, body.messages, None, body.add_generation_prompt, run=in_turn(http))
    else:
        assert body.prompt is not None
        text, special = body.prompt, body.add_special_tokens
        tokens = await in_turn(http)(len(text), lambda: codec.encode(text, add_special_tokens=special))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.core.max_length}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HTTPRequest) -> dict[str, str]:
    """The text of tokens, special ones included."""
    state = state_of(http)
    _, codec = state.ready_engine()
    state.check_model(body.model)
    highest = max(body.tokens, default=0)
    if highest >= codec.vocabulary_size:
        raise bad_value("tokens", f"token {highest} is not in the vocabulary of {codec.vocabulary_size}")
    text = await in_turn(http)(4 * len(body.tokens), lambda: codec.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}
