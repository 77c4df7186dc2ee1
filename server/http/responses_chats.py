"""OpenAI's responses as chats: items as messages, and the fields of the same meaning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from bigmodel.server.http.responses_bodies import (
    AllowedFunctions,
    CallItem,
    CallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    NamedFunction,
    OutputRefusal,
    OutputText,
    ReasoningItem,
    ResponsesBody,
    text_of,
)

FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tools\.(\d+)\.function": r"tools.\1",
}
"""Fields of a chat, as patterns, and what they are called here."""


def chat_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of the chat that asks for the same, as from JSON."""
    fields: dict[str, Any] = {
        "messages": list(_messages(body)),
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "ignore_eos": body.ignore_eos,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        **{name: getattr(body, name) for name in ("model", "temperature", "top_p", "stream")},
    }
    if body.tools:
        given = [tool.model_dump(exclude={"type"}) for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in given]
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        fields["tool_choice"] = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(each) for each in choice.tools]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        fields["tool_choice"] = choice
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    form = None if body.text is None else body.text.format
    if form is not None:
        schema = form.model_dump(by_alias=True, exclude={"type"}) if form.type == "json_schema" else None
        fields["response_format"] = {"type": form.type, "json_schema": schema}
    return fields


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _messages(body: ResponsesBody) -> Iterator[dict[str, Any]]:
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    for of_answer, items in groupby(body.input, key=_is_of_answer):
        if of_answer:
            yield from _answers(items)
        else:
            yield from _questions(items)


def _is_of_answer(item: Item) -> bool:
    return isinstance(item, (CallItem, ReasoningItem)) or (isinstance(item, MessageItem) and item.role == "assistant")


def _questions(items: Iterator[Item]) -> Iterator[dict[str, Any]]:
    """Results of calls and messages. Images of results follow these: the user has them."""
    for of_calls, group in groupby(items, key=lambda item: isinstance(item, CallOutputItem)):
        if not of_calls:
            yield from map(_question, group)
            continue
        results = [item for item in group if isinstance(item, CallOutputItem)]
        for item in results:
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
        images = [_part(image) for item in results for image in item.images]
        if images:
            yield {"role": "user", "content": images}


def _question(item: Item) -> dict[str, Any]:
    assert isinstance(item, MessageItem)
    if isinstance(item.content, str) or not any(isinstance(part, InputImage) for part in item.content):
        return {"role": item.role, "content": item.text}
    return {"role": item.role, "content": [_part(part) for part in item.content]}


def _part(part: InputText | InputImage | OutputText | OutputRefusal) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


def _answers(items: Iterator[Item]) -> Iterator[dict[str, Any]]:
    """Items next to each other as answers: reasoning, then text, then calls belong to one."""
    found: dict[str, Any] = {}
    for item in items:
        if isinstance(item, CallItem):
            call = {"id": item.call_id, "type": "function"}
            function = {"name": item.name, "arguments": item.arguments}
            found = {"role": "assistant", "content": "", **found}
            found.setdefault("tool_calls", []).append({**call, "function": function})
            continue
        assert isinstance(item, (MessageItem, ReasoningItem))
        part = "content" if isinstance(item, MessageItem) else "reasoning_content"
        begun = "tool_calls" in found or found.get("content") or (part in found and part != "content")
        if found and begun:
            yield found
            found = {}
        found = {"role": "assistant", "content": "", **found, part: item.text}
    if found:
        yield found
