"""POST /v1/completions: texts, continued as they are."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.answers.openai import CompletionAnswer
from bigmodel.server.http.bodies import release
from bigmodel.server.http.engine_requests import (
    DEFAULT_COMPLETION_TOKENS,
    check_number,
    encode_prompt,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
    too_long,
)
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.parsing import JSONRoute, OffLoop, end_turn, in_turn, off_loop
from bigmodel.server.http.respond import JoinedRequests, respond
from bigmodel.server.http.state import state_of
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TextCodec

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
    """Continue a text, or several."""
    async with state_of(http).model(http, body.model) as model:
        return await _completed(body, http, model)


async def _completed(body: CompletionBody, http: HTTPRequest, model: RunningModel) -> Response:
    """The response of a model."""
    engine, codec = model.engine, model.codec
    check_number(engine, len(given_prompts(body)), body.n or 1)
    prompts = await completion_prompts(body, codec, engine.core.max_length, in_turn(http))
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise bad_value("max_tokens", "max_tokens=0 is only allowed with echo=true")
    mailbox = state_of(http).mailbox(at_once=not body.stream)
    grammar = await grammar_of(body, model, http)
    adapter = state_of(http).adapter_of(body.model)
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
        requests.append(make_request(http, body, prompt, params, mailbox.sink(number), adapter=adapter))
    answer = CompletionAnswer(
        f"cmpl-{uuid.uuid4().hex}",
        int(time.time()),
        state_of(http).adapter_of(body.model) or model.name,
        prompts,
        body.n or 1,
        codec,
        echo=echo,
        logprobs=body.logprobs is not None,
        usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    submit_all(engine, requests)
    end_turn(http)
    stream = bool(body.stream)
    release(body)
    return await respond(http, JoinedRequests(engine, requests, mailbox), answer, stream=stream)


def given_prompts(body: CompletionBody) -> list[Any]:
    """Prompts of a completion, each a text or a list of tokens."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


async def completion_prompts(
    body: CompletionBody, codec: TextCodec, longest: int, run: OffLoop = off_loop
) -> list[list[int]]:
    """Return the prompts of a completion as tokens; 400 for one of more than `longest`."""
    prompts = []
    size = sum(len(one) for one in given_prompts(body) if isinstance(one, str))
    for one in given_prompts(body):
        if isinstance(one, str):
            one = await encode_prompt(codec, one, body.add_special_tokens, longest, "prompt", run, size)
        elif len(one) > longest:
            raise too_long(len(one), longest, "prompt")
        elif max(one) >= codec.vocabulary_size:
            raise bad_value("prompt", f"token {max(one)} is not in the vocabulary of {codec.vocabulary_size}")
        prompts.append(one)
    return prompts
