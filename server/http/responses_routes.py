"""POST /v1/responses: OpenAI's newer interface, without state."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.answers.responses import ResponseAnswer
from bigmodel.server.http.chat_requests import as_chat, fields_named, prepare_chat
from bigmodel.server.http.parsing import ANY_SIZE, JSONRoute, in_turn
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.responses_chats import FIELDS, chat_fields
from bigmodel.server.http.state import state_of

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/responses")
async def responses(body: ResponsesBody, http: HTTPRequest) -> Response:
    """Answer a text or a list of items, as OpenAI's responses do."""
    with fields_named(FIELDS):
        chat = await as_chat(http, body, chat_fields, "input")
    async with state_of(http).model(http, body.model) as model:
        with fields_named(FIELDS):
            prepared = await prepare_chat(chat, http, model)

        def repeated() -> tuple[dict[str, Any], str]:
            made = head(body, state_of(http).adapter_of(body.model) or model.name)
            return made, json.dumps(made)

        begin, begin_json = await in_turn(http)(ANY_SIZE, repeated)  # instructions and tools may be large
        answer = ResponseAnswer(begin, begin_json, model.codec, prepared.form, logprobs=body.logprobs)
        return await prepared.answer(http, answer, body, chat, stream=body.stream)


def head(body: ResponsesBody, model: str) -> dict[str, Any]:
    """Return what the objects of a response begin with."""
    given = body.model_dump(mode="json", by_alias=True, exclude={"input"})
    tools = [{**tool, "parameters": tool["parameters"] or {}} for tool in given["tools"] or ()]
    text = given["text"] or {}
    form = {name: value for name, value in (text.get("format") or {"type": "text"}).items() if value is not None}
    same = ("instructions", "max_output_tokens", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "user")
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **{field: given[field] for field in same},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": tools,
        "tool_choice": given["tool_choice"] or "auto",
        "text": {"format": form, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None, **(given["reasoning"] or {})},
        "metadata": given["metadata"] or {},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
    }
