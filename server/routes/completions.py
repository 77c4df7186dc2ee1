"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from bigmodel.server.answering import Joined, respond
from bigmodel.server.answers.completion import CompletionAnswer
from bigmodel.server.errors import bad_value
from bigmodel.server.intake import (
    DEFAULT_COMPLETION_TOKENS,
    check_number,
    completion_prompts,
    given_prompts,
    grammar_of,
    make_request,
    sampling_params,
    submit_all,
    token_limit,
)
from bigmodel.server.schemas import CompletionBody
from bigmodel.server.state import state_of

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: Request) -> Response:
    """Continue a text, or several."""
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    check_number(engine, len(given_prompts(body)), body.n or 1)
    prompts = await completion_prompts(body, codec)
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise bad_value("max_tokens", "max_tokens=0 is only allowed with echo=true")
    mailbox = state.mailbox(at_once=not body.stream)
    requests = []
    grammar = await grammar_of(body, state)
    for number, prompt in enumerate(prompts):
        longest = engine.core.max_length
        limit = token_limit(body.limit, DEFAULT_COMPLETION_TOKENS, len(prompt), longest)
        params = sampling_params(
            body,
            codec,
            max_tokens=limit,
            logprobs=body.logprobs,
            prompt_logprobs=echo and body.logprobs is not None,
            grammar=grammar,
        )
        requests.append(make_request(state, body, prompt, params, mailbox.slot(number)))
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
    return await respond(http, Joined(engine, requests, mailbox), answer, stream=bool(body.stream))
